package io.streammeta.kafka;

import static io.streammeta.client.StreammetaClient.await;
import static io.streammeta.kafka.Segments.newPartition;
import static io.streammeta.kafka.Segments.segment;
import static io.streammeta.kafka.Segments.update;
import static org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState.COPY_SEGMENT_FINISHED;
import static org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState.DELETE_SEGMENT_FINISHED;
import static org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState.DELETE_SEGMENT_STARTED;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import io.streammeta.testkit.Waiting;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState;
import org.apache.kafka.server.log.remote.storage.RemotePartitionDeleteMetadata;
import org.apache.kafka.server.log.remote.storage.RemotePartitionDeleteState;
import org.apache.kafka.server.log.remote.storage.RemoteResourceNotFoundException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageException;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class RemoteLogMetadataManagerTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private final TopicIdPartition partition = newPartition();
    private final List<StreammetaRemoteLogMetadataManager> managers = new ArrayList<>();
    private StreammetaRemoteLogMetadataManager manager;

    private StreammetaRemoteLogMetadataManager start() {
        var started = new StreammetaRemoteLogMetadataManager();
        started.configure(Map.of("endpoints", String.join(",", CONTROLLERS.endpoints()), "broker.id", 1));
        managers.add(started);
        return started;
    }

    @BeforeEach
    void startOne() {
        manager = start();
        manager.onPartitionLeadershipChanges(Set.of(partition), Set.of());
    }

    @AfterEach
    void close() {
        managers.forEach(StreammetaRemoteLogMetadataManager::close);
    }

    private static void done(CompletableFuture<Void> future) throws Exception {
        future.get(30, TimeUnit.SECONDS);
    }

    private static Throwable failure(CompletableFuture<Void> future) {
        return assertThrows(ExecutionException.class, () -> future.get(30, TimeUnit.SECONDS)).getCause();
    }

    private RemoteLogSegmentMetadata copied(long start, long end, Map<Integer, Long> epochs) throws Exception {
        RemoteLogSegmentMetadata added = segment(partition, start, end, epochs);
        done(manager.addRemoteLogSegmentMetadata(added));
        return changed(added, COPY_SEGMENT_FINISHED);
    }

    private RemoteLogSegmentMetadata changed(RemoteLogSegmentMetadata segment, RemoteLogSegmentState state)
            throws Exception {
        done(manager.updateRemoteLogSegmentMetadata(update(segment, state)));
        return segment.createWithUpdates(update(segment, state));
    }

    private static List<RemoteLogSegmentMetadata> list(
            StreammetaRemoteLogMetadataManager of, TopicIdPartition partition) throws Exception {
        List<RemoteLogSegmentMetadata> found = new ArrayList<>();
        of.listRemoteLogSegments(partition).forEachRemaining(found::add);
        return found;
    }

    private List<String> keys() {
        try (var client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            return await(client.keyValues("kafka-tiered").listKeys(SegmentKeys.prefixOf(partition)).toList()).stream()
                    .map(value -> value.key())
                    .toList();
        }
    }

    /** The states and look-ups that Kafka's own manager has in the same order of events. */
    @Test
    void aSegmentIsReadableBetweenTheEndOfItsCopyAndTheBeginningOfItsDeletion() throws Exception {
        Map<Integer, Long> epochs = Map.of(0, 0L, 1, 20L, 2, 80L);
        RemoteLogSegmentMetadata first = segment(partition, 0, 100, epochs);
        done(manager.addRemoteLogSegmentMetadata(first));
        assertEquals(Optional.empty(), manager.remoteLogSegmentMetadata(partition, 1, 40));
        assertEquals(Optional.empty(), manager.highestOffsetForEpoch(partition, 1));
        assertEquals(first, manager.listRemoteLogSegments(partition, 2).next());

        first = changed(first, COPY_SEGMENT_FINISHED);
        RemoteLogSegmentMetadata second = copied(101, 200, Map.of(2, 101L));
        RemoteLogSegmentMetadata third = copied(201, 300, Map.of(2, 201L, 3, 240L));
        RemoteLogSegmentMetadata fourth = copied(250, 400, Map.of(3, 250L, 4, 370L));
        assertEquals(Optional.of(first), manager.remoteLogSegmentMetadata(partition, 1, 40));
        assertEquals(Optional.of(second), manager.remoteLogSegmentMetadata(partition, 2, 110));
        assertEquals(Optional.of(third), manager.remoteLogSegmentMetadata(partition, 3, 240));
        assertEquals(Optional.of(fourth), manager.remoteLogSegmentMetadata(partition, 3, 250));
        assertEquals(Optional.of(fourth), manager.remoteLogSegmentMetadata(partition, 4, 375));
        assertEquals(Optional.empty(), manager.remoteLogSegmentMetadata(partition, 1, 110));
        assertEquals(Optional.empty(), manager.remoteLogSegmentMetadata(partition, 4, 401));
        assertEquals(Optional.empty(), manager.remoteLogSegmentMetadata(partition, 5, 301));
        assertEquals(3000, manager.remoteLogSize(partition, 2));

        first = changed(first, DELETE_SEGMENT_STARTED);
        assertEquals(Optional.empty(), manager.remoteLogSegmentMetadata(partition, 0, 10));
        assertEquals(first, manager.listRemoteLogSegments(partition, 0).next());
        changed(first, DELETE_SEGMENT_FINISHED);
        assertFalse(manager.listRemoteLogSegments(partition, 0).hasNext());

        Map<Integer, Long> highest = new HashMap<>();
        for (int epoch = 0; epoch <= 5; epoch++) {
            int present = epoch;
            manager.highestOffsetForEpoch(partition, epoch).ifPresent(offset -> highest.put(present, offset));
        }
        assertEquals(Map.of(0, 19L, 1, 79L, 2, 239L, 3, 369L, 4, 400L), highest);
    }

    @Test
    void theNextTransactionIndexIsThatOfALaterSegment() throws Exception {
        for (long start = 0; start < 500; start += 100) {
            RemoteLogSegmentMetadata added = segment(partition, start, start + 99, Map.of(0, start), start != 300);
            done(manager.addRemoteLogSegmentMetadata(added));
            changed(added, COPY_SEGMENT_FINISHED);
        }
        assertEquals(300, manager.nextSegmentWithTxnIndex(partition, 0, 10).orElseThrow().startOffset());
        assertEquals(Optional.empty(), manager.nextSegmentWithTxnIndex(partition, 0, 400));
    }

    @Test
    void anotherBrokerSeesAllStatesAndARestartTheSame() throws Exception {
        StreammetaRemoteLogMetadataManager other = start();
        RemoteLogSegmentMetadata kept = copied(0, 99, Map.of(0, 0L));
        RemoteLogSegmentMetadata deleting = changed(copied(100, 199, Map.of(0, 100L)), DELETE_SEGMENT_STARTED);
        changed(changed(copied(200, 299, Map.of(0, 200L)), DELETE_SEGMENT_STARTED), DELETE_SEGMENT_FINISHED);

        StreammetaRemoteLogMetadataManager restarted = start();
        assertEquals(List.of(kept, deleting), list(restarted, partition));
        assertEquals(Optional.of(kept), restarted.remoteLogSegmentMetadata(partition, 0, 50));
        assertEquals(Optional.of(199L), restarted.highestOffsetForEpoch(partition, 0));
        // The reads above waited for the keys of this partition only.
        Waiting.until("all keys are listed", () -> restarted.isReady(partition));
        for (int attempt = 0; attempt < 100 && list(other, partition).size() != 2; attempt++) {
            Thread.sleep(50);
        }
        assertEquals(List.of(kept, deleting), list(other, partition));
    }

    @Test
    void aFormerLeaderCannotFinishACopyThatWasDeleted() throws Exception {
        StreammetaRemoteLogMetadataManager next = start();
        RemoteLogSegmentMetadata unfinished = segment(partition, 0, 99, Map.of(0, 0L));
        RemoteLogSegmentMetadata own = segment(partition, 100, 199, Map.of(1, 100L));
        done(manager.addRemoteLogSegmentMetadata(unfinished));
        done(next.addRemoteLogSegmentMetadata(own));
        next.onPartitionLeadershipChanges(Set.of(partition), Set.of());
        for (int attempt = 0; attempt < 100 && keys().size() != 1; attempt++) {
            Thread.sleep(50);
        }

        assertEquals(List.of(SegmentKeys.of(own.remoteLogSegmentId())), keys());
        assertInstanceOf(
                RemoteResourceNotFoundException.class,
                failure(manager.updateRemoteLogSegmentMetadata(update(unfinished, COPY_SEGMENT_FINISHED))));
        done(next.updateRemoteLogSegmentMetadata(update(own, COPY_SEGMENT_FINISHED)));
    }

    @Test
    void twoLeadersDoNotUndoEachOthersChanges() throws Exception {
        StreammetaRemoteLogMetadataManager other = start();
        RemoteLogSegmentMetadata segment = segment(partition, 0, 99, Map.of(0, 0L));
        done(manager.addRemoteLogSegmentMetadata(segment));
        done(other.updateRemoteLogSegmentMetadata(update(segment, DELETE_SEGMENT_STARTED)));
        // This broker may not have seen the deletion yet.
        Throwable error = failure(manager.updateRemoteLogSegmentMetadata(update(segment, COPY_SEGMENT_FINISHED)));
        assertInstanceOf(RemoteStorageException.class, error);

        // Repeats succeed, whoever was first.
        done(manager.updateRemoteLogSegmentMetadata(update(segment, DELETE_SEGMENT_STARTED)));
        done(manager.updateRemoteLogSegmentMetadata(update(segment, DELETE_SEGMENT_FINISHED)));
        done(other.updateRemoteLogSegmentMetadata(update(segment, DELETE_SEGMENT_FINISHED)));
        assertEquals(List.of(), keys());
        assertEquals(List.of(), list(manager, partition));
    }

    @Test
    void manySegmentsArriveInEveryManagerWhileTheLeaderIsKilled() throws Exception {
        List<CompletableFuture<Void>> added = new ArrayList<>();
        for (int number = 0; number < 300; number++) {
            added.add(manager.addRemoteLogSegmentMetadata(
                    segment(partition, number * 10L, number * 10L + 9, Map.of(0, number * 10L))));
            if (number == 100) {
                CONTROLLERS.kill(1);
            }
        }
        for (CompletableFuture<Void> future : added) {
            done(future);
        }
        CONTROLLERS.start(1);
        assertEquals(300, list(manager, partition).size());
        assertEquals(300, list(start(), partition).size());
        done(manager.putRemotePartitionDeleteMetadata(new RemotePartitionDeleteMetadata(
                partition, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED, 1, 1)));
        assertEquals(List.of(), list(manager, partition));
        assertEquals(List.of(), keys());
    }
}
