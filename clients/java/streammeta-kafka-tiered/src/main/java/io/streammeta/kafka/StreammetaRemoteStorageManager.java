package io.streammeta.kafka;

import static io.streammeta.client.StreammetaClient.await;

import io.streammeta.client.NamedObjectToCommit;
import io.streammeta.client.ObjectOwner;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.KeyNotFoundException;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.store.ObjectKeys;
import io.streammeta.store.ObjectNotFoundException;
import io.streammeta.store.ObjectStore;
import io.streammeta.store.StorageException;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.concurrent.CancellationException;
import java.util.zip.CRC32C;
import org.apache.kafka.common.config.ConfigException;
import org.apache.kafka.server.log.remote.storage.LogSegmentData;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentId;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata.CustomMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteResourceNotFoundException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageManager;

/**
 * Remote log segments as named objects in the cluster's bucket. Kafka creates it, by
 * {@code remote.log.storage.manager.class.name}.
 *
 * <p>A segment is two objects, its records and all its indexes, which one request names. The segment's key owns them,
 * so that they are destroyed with it at the latest: this class needs {@link StreammetaRemoteLogMetadataManager} beside
 * it. Objects of a copy that was not finished expire.
 */
public final class StreammetaRemoteStorageManager implements RemoteStorageManager {
    /** The time for the upload of a segment, after which the controllers give up the objects. */
    private static final Duration TIME_TO_COMMIT = Duration.ofHours(1);

    private static final int CHECKSUM_CHUNK = 256 * 1024;
    private static final String NAME_PREFIX = "kafka-tiered/";

    private StreammetaClient client;
    private NodeSession session;
    private ObjectStore store;
    private String namespace;
    private volatile String objectNamespace; // null before it was asked for

    /** Creates a manager, which {@link #configure} starts. */
    public StreammetaRemoteStorageManager() {}

    /** Reads the options. The controllers and the bucket need not be reachable yet. */
    @Override
    public void configure(Map<String, ?> configs) {
        StorageConfig config = new StorageConfig(configs);
        if (config.nodeId() < 0) {
            throw new ConfigException(StorageConfig.NODE_ID + " is missing, and Kafka gave no id of the broker");
        }
        store = ObjectStore.open(config.bucket());
        client = config.newClient();
        session = new NodeSession(client, config.nodeId());
        namespace = config.namespace();
    }

    @Override
    public Optional<CustomMetadata> copyLogSegmentData(RemoteLogSegmentMetadata metadata, LogSegmentData data)
            throws RemoteStorageException {
        RemoteLogSegmentId id = metadata.remoteLogSegmentId();
        return run("copy segment " + id, () -> Optional.of(copy(id, data).toCustomMetadata()));
    }

    private SegmentLayout copy(RemoteLogSegmentId id, LogSegmentData data) throws IOException {
        Map<IndexType, Integer> sizes = new EnumMap<>(IndexType.class);
        ByteBuffer indexes = readIndexes(data, sizes);
        int dataSize = Math.toIntExact(Files.size(data.logSegment()));
        long dataObjectId = session.call(node -> node.objects().prepare(2, TIME_TO_COMMIT))
                .firstObjectId();
        SegmentLayout layout = new SegmentLayout(dataObjectId, dataSize, sizes);

        // The bytes come first: a named object is in the bucket.
        store.put(keyOf(layout.dataObjectId()), data.logSegment());
        store.put(keyOf(layout.indexObjectId()), indexes.duplicate());

        var owner = new ObjectOwner.Key(namespace, SegmentKeys.of(id));
        List<NamedObjectToCommit> named = List.of(
                new NamedObjectToCommit(layout.dataObjectId(), dataName(id), dataSize,
                        OptionalLong.of(checksum(data.logSegment())), owner, Map.of()),
                new NamedObjectToCommit(layout.indexObjectId(), indexName(id), indexes.remaining(),
                        OptionalLong.of(checksum(indexes)), owner, Map.of()));
        session.call(node -> node.namedObjects().commit(named));
        return layout;
    }

    private static ByteBuffer readIndexes(LogSegmentData data, Map<IndexType, Integer> sizes) throws IOException {
        Map<IndexType, ByteBuffer> indexes = new EnumMap<>(IndexType.class);
        indexes.put(IndexType.OFFSET, read(data.offsetIndex()));
        indexes.put(IndexType.TIMESTAMP, read(data.timeIndex()));
        indexes.put(IndexType.PRODUCER_SNAPSHOT, read(data.producerSnapshotIndex()));
        if (data.transactionIndex().isPresent()) {
            indexes.put(IndexType.TRANSACTION, read(data.transactionIndex().get()));
        }
        indexes.put(IndexType.LEADER_EPOCH, data.leaderEpochIndex().duplicate());

        indexes.forEach((type, index) -> sizes.put(type, index.remaining()));
        ByteBuffer all = ByteBuffer.allocate(
                sizes.values().stream().mapToInt(Integer::intValue).sum());
        SegmentLayout.INDEXES.stream().filter(indexes::containsKey).forEach(type -> all.put(indexes.get(type)));
        return all.flip();
    }

    private static ByteBuffer read(Path file) throws IOException {
        return ByteBuffer.wrap(Files.readAllBytes(file));
    }

    private static long checksum(ByteBuffer bytes) {
        CRC32C sum = new CRC32C();
        sum.update(bytes.duplicate());
        return sum.getValue();
    }

    private static long checksum(Path file) throws IOException {
        CRC32C sum = new CRC32C();
        ByteBuffer chunk = ByteBuffer.allocate(CHECKSUM_CHUNK);
        try (FileChannel channel = FileChannel.open(file)) {
            while (channel.read(chunk) >= 0) {
                sum.update(chunk.flip());
                chunk.clear();
            }
        }
        return sum.getValue();
    }

    @Override
    public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int startPosition)
            throws RemoteStorageException {
        return fetchLogSegment(metadata, startPosition, Integer.MAX_VALUE);
    }

    /** Opens the bytes of a segment from a start to an end, both inclusive. An end behind the segment is its last byte. */
    @Override
    public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int startPosition, int endPosition)
            throws RemoteStorageException {
        if (startPosition < 0 || endPosition < startPosition) {
            throw new IllegalArgumentException(
                    "positions " + startPosition + " to " + endPosition + " are no part of a segment");
        }
        SegmentLayout layout = layoutOf(metadata);
        long end = Math.min(endPosition + 1L, layout.dataSize());
        return run(
                "fetch segment " + metadata.remoteLogSegmentId(),
                () -> open(layout.dataObjectId(), startPosition, end));
    }

    @Override
    public InputStream fetchIndex(RemoteLogSegmentMetadata metadata, IndexType indexType)
            throws RemoteStorageException {
        RemoteLogSegmentId id = metadata.remoteLogSegmentId();
        SegmentLayout layout = layoutOf(metadata);
        SegmentLayout.Range range = layout.index(indexType)
                .orElseThrow(() -> new RemoteResourceNotFoundException("segment " + id + " has no index " + indexType));
        return run(
                "fetch index " + indexType + " of segment " + id,
                () -> open(layout.indexObjectId(), range.start(), range.end()));
    }

    private InputStream open(long objectId, long start, long end) {
        // A store rejects a range without bytes, such as an empty index.
        return start >= end ? InputStream.nullInputStream() : store.openRange(keyOf(objectId), start, end);
    }

    private static SegmentLayout layoutOf(RemoteLogSegmentMetadata metadata) throws RemoteStorageException {
        CustomMetadata custom = metadata.customMetadata()
                .orElseThrow(() -> new RemoteResourceNotFoundException(
                        "segment " + metadata.remoteLogSegmentId() + " has no custom metadata: its copy is unfinished"));
        try {
            return SegmentLayout.of(custom);
        } catch (IllegalArgumentException error) {
            throw new RemoteStorageException("segment " + metadata.remoteLogSegmentId() + " can't be read: "
                    + error.getMessage(), error);
        }
    }

    /** Deletes the objects of a segment. A segment without objects counts as deleted. */
    @Override
    public void deleteLogSegmentData(RemoteLogSegmentMetadata metadata) throws RemoteStorageException {
        RemoteLogSegmentId id = metadata.remoteLogSegmentId();
        List<String> names = List.of(dataName(id), indexName(id));
        run("delete segment " + id, () -> session.call(node -> node.namedObjects().delete(names)));
    }

    private static String dataName(RemoteLogSegmentId id) {
        return NAME_PREFIX + SegmentKeys.of(id) + "/data";
    }

    private static String indexName(RemoteLogSegmentId id) {
        return NAME_PREFIX + SegmentKeys.of(id) + "/indexes";
    }

    private String keyOf(long objectId) {
        if (objectNamespace == null) {
            objectNamespace = await(client.describeCluster()).objectNamespace();
        }
        return ObjectKeys.of(objectNamespace, objectId);
    }

    @FunctionalInterface
    private interface Step<T> {
        T run() throws IOException;
    }

    private static <T> T run(String what, Step<T> step) throws RemoteStorageException {
        try {
            return step.run();
        } catch (ObjectNotFoundException error) {
            throw new RemoteResourceNotFoundException("can't " + what + ": " + error.getMessage(), error);
        } catch (KeyNotFoundException error) {
            throw new RemoteStorageException("can't " + what + ": its key was deleted, or is another plug-in's."
                    + " Next step: check that remote.log.metadata.manager.class.name is "
                    + StreammetaRemoteLogMetadataManager.class.getName()
                    + " and that both have the same namespace", error);
        } catch (StorageException | StreammetaException | CancellationException | IOException error) {
            throw new RemoteStorageException("can't " + what + ": " + error.getMessage(), error);
        }
    }

    @Override
    public void close() {
        if (client != null) {
            session.close();
            client.close();
            store.close();
        }
    }
}
