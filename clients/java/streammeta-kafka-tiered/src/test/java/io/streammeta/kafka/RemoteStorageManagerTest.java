package io.streammeta.kafka;

import static io.streammeta.client.StreammetaClient.await;
import static io.streammeta.kafka.Segments.newPartition;
import static io.streammeta.kafka.Segments.segment;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Random;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.server.log.remote.storage.LogSegmentData;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata.CustomMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadataUpdate;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState;
import org.apache.kafka.server.log.remote.storage.RemoteResourceNotFoundException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageManager.IndexType;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.io.TempDir;

class RemoteStorageManagerTest {
    private static final int NODE_ID = 5;

    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static StreammetaRemoteLogMetadataManager notes;
    private static StreammetaRemoteStorageManager storage;
    private static StreammetaClient client;

    @TempDir
    Path folder;

    private final TopicIdPartition partition = newPartition();
    private final byte[] records = bytes(300_000, 1);
    private RemoteLogSegmentMetadata added;

    @BeforeAll
    static void start() {
        String endpoints = String.join(",", CONTROLLERS.endpoints());
        notes = new StreammetaRemoteLogMetadataManager();
        notes.configure(Map.of("endpoints", endpoints));
        storage = new StreammetaRemoteStorageManager();
        storage.configure(Map.of("endpoints", endpoints, "bucket", CONTROLLERS.bucket(), "broker.id", NODE_ID));
        client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build();
    }

    @AfterAll
    static void close() {
        storage.close();
        notes.close();
        client.close();
    }

    @BeforeEach
    void add() throws Exception {
        added = segment(partition, 0, 99, Map.of(0, 0L));
        notes.addRemoteLogSegmentMetadata(added).get(30, TimeUnit.SECONDS);
    }

    private static byte[] bytes(int size, int seed) {
        byte[] bytes = new byte[size];
        new Random(seed).nextBytes(bytes);
        return bytes;
    }

    private Path file(String name, byte[] content) throws Exception {
        return Files.write(folder.resolve(name), content);
    }

    private LogSegmentData data(Optional<byte[]> transactions) throws Exception {
        Optional<Path> transactionIndex =
                transactions.isPresent() ? Optional.of(file("txnindex", transactions.get())) : Optional.empty();
        return new LogSegmentData(
                file("log", records),
                file("index", bytes(800, 2)),
                file("timeindex", new byte[0]),
                transactionIndex,
                file("snapshot", bytes(50, 3)),
                ByteBuffer.wrap(bytes(20, 4)));
    }

    private RemoteLogSegmentMetadata copy(Optional<byte[]> transactions) throws Exception {
        Optional<CustomMetadata> custom = storage.copyLogSegmentData(added, data(transactions));
        assertTrue(custom.orElseThrow().value().length <= 128, "Kafka's default limit");
        return added.createWithUpdates(new RemoteLogSegmentMetadataUpdate(
                added.remoteLogSegmentId(), 1, custom, RemoteLogSegmentState.COPY_SEGMENT_FINISHED, 1));
    }

    private List<String> names() {
        return await(client.namedObjects().list("kafka-tiered/" + SegmentKeys.prefixOf(partition)).toList()).stream()
                .map(object -> object.name())
                .toList();
    }

    @Test
    void recordsAreReadFromAnyPositionToAnyEnd() throws Exception {
        RemoteLogSegmentMetadata copied = copy(Optional.empty());
        assertArrayEquals(records, storage.fetchLogSegment(copied, 0).readAllBytes());
        assertArrayEquals(
                Arrays.copyOfRange(records, 1000, 3001), storage.fetchLogSegment(copied, 1000, 3000).readAllBytes());
        assertArrayEquals(
                Arrays.copyOfRange(records, 299_990, 300_000),
                storage.fetchLogSegment(copied, 299_990, 400_000).readAllBytes());
        assertThrows(IllegalArgumentException.class, () -> storage.fetchLogSegment(copied, -1));
    }

    @Test
    void indexesAreReadByType() throws Exception {
        RemoteLogSegmentMetadata copied = copy(Optional.of(bytes(34, 5)));
        assertArrayEquals(bytes(800, 2), storage.fetchIndex(copied, IndexType.OFFSET).readAllBytes());
        assertArrayEquals(new byte[0], storage.fetchIndex(copied, IndexType.TIMESTAMP).readAllBytes());
        assertArrayEquals(bytes(50, 3), storage.fetchIndex(copied, IndexType.PRODUCER_SNAPSHOT).readAllBytes());
        assertArrayEquals(bytes(34, 5), storage.fetchIndex(copied, IndexType.TRANSACTION).readAllBytes());
        assertArrayEquals(bytes(20, 4), storage.fetchIndex(copied, IndexType.LEADER_EPOCH).readAllBytes());
    }

    @Test
    void aSegmentWithoutTransactionsHasNoIndexOfThem() throws Exception {
        RemoteLogSegmentMetadata copied = copy(Optional.empty());
        assertThrows(
                RemoteResourceNotFoundException.class, () -> storage.fetchIndex(copied, IndexType.TRANSACTION));
    }

    @Test
    void aDeletionMayBeRepeated() throws Exception {
        RemoteLogSegmentMetadata copied = copy(Optional.empty());
        assertEquals(2, names().size());
        storage.deleteLogSegmentData(copied);
        storage.deleteLogSegmentData(copied);
        assertEquals(List.of(), names());
    }

    @Test
    void theObjectsGoWithTheKeyOfTheirSegment() throws Exception {
        copy(Optional.empty()); // the broker ends before it notes the copy
        await(client.keyValues("kafka-tiered").delete(SegmentKeys.of(added.remoteLogSegmentId())));
        assertEquals(List.of(), names());
        // A broker that goes on with the copy can't leave objects without an owner.
        assertThrows(RemoteStorageException.class, () -> storage.copyLogSegmentData(added, data(Optional.empty())));
        assertEquals(List.of(), names());
    }

    @Test
    void aNodeThatANewerProcessReplacedStopsWriting() throws Exception {
        copy(Optional.empty());
        var successor = new StreammetaRemoteStorageManager();
        successor.configure(Map.of(
                "endpoints", String.join(",", CONTROLLERS.endpoints()),
                "bucket", CONTROLLERS.bucket(),
                "node.id", NODE_ID + 1));
        successor.deleteLogSegmentData(added);
        long epoch = System.currentTimeMillis() + 60_000;
        await(client.openSession(new NodeIdentity(NODE_ID + 1, epoch), SessionOptions.DEFAULT)).close();
        assertThrows(RemoteStorageException.class, () -> successor.copyLogSegmentData(added, data(Optional.empty())));
        successor.close();
    }
}
