package io.streammeta.automq;

import static io.streammeta.automq.Node.get;

import com.automq.stream.Version;
import com.automq.stream.api.CreateStreamOptions;
import com.automq.stream.api.OpenStreamOptions;
import com.automq.stream.api.Stream;
import com.automq.stream.s3.Config;
import com.automq.stream.s3.S3Storage;
import com.automq.stream.s3.S3StreamClient;
import com.automq.stream.s3.cache.blockcache.DefaultObjectReaderFactory;
import com.automq.stream.s3.cache.blockcache.StreamReaders;
import com.automq.stream.s3.compact.CompactionManager;
import com.automq.stream.s3.compact.StreamObjectCompactor;
import com.automq.stream.s3.compact.Unthrottled;
import com.automq.stream.s3.failover.Failover;
import com.automq.stream.s3.failover.FailoverFactory;
import com.automq.stream.s3.failover.FailoverRequest;
import com.automq.stream.s3.failover.StorageFailureHandlerChain;
import com.automq.stream.s3.metadata.ObjectUtils;
import com.automq.stream.s3.objects.ObjectManager;
import com.automq.stream.s3.operator.BucketURI;
import com.automq.stream.s3.operator.LocalFileObjectStorage;
import com.automq.stream.s3.operator.ObjectStorage;
import com.automq.stream.s3.streams.StreamManager;
import com.automq.stream.s3.wal.OpenMode;
import com.automq.stream.s3.wal.WriteAheadLog;
import com.automq.stream.s3.wal.impl.object.ObjectReservationService;
import com.automq.stream.s3.wal.impl.object.ObjectWALConfig;
import com.automq.stream.s3.wal.impl.object.ObjectWALService;
import com.automq.stream.utils.IdURI;
import com.automq.stream.utils.Time;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionOptions;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.function.Consumer;

/** A node that runs AutoMQ's s3stream, over a directory or memory as its bucket. */
final class S3streamNode implements AutoCloseable {
    private static final String CLUSTER = "test";
    private static final String WAL = "s3://wal";

    private final AutomqMetadata metadata;
    private final Config config;
    private final ObjectStorage storage;
    private final S3Storage log;
    private final S3StreamClient client;
    private final CompletableFuture<FailoverRequest> recovered = new CompletableFuture<>();

    private S3streamNode(List<String> endpoints, ObjectStorage storage, NodeIdentity identity) {
        this.storage = storage;
        CompletableFuture<Failover> failover = new CompletableFuture<>();
        Recoveries recoveries = new Recoveries(request -> failover.thenCompose(ready -> ready.failover(request))
                .whenComplete((response, error) -> {
                    if (error == null) {
                        recovered.complete(request);
                    }
                }));
        SessionOptions options = SessionOptions.DEFAULT
                .withWalConfig(WAL)
                .withTimeout(Duration.ofSeconds(2))
                .withListener(recoveries);
        metadata = AutomqMetadata.open(
                ElasticStreamEndpoint.parse("streammeta://" + String.join(",", endpoints)),
                identity,
                options,
                HostErrors.NONE);
        ObjectUtils.setNamespace(metadata.objectNamespace());

        config = new Config()
                .nodeId(identity.nodeId())
                .nodeEpoch(identity.nodeEpoch())
                .version(() -> Version.LATEST)
                .walCacheSize(64 << 20)
                .walUploadThreshold(16 << 20)
                .blockCacheSize(32 << 20)
                .streamSetObjectCompactionInterval(1)
                .streamSetObjectCompactionCacheSize(32 << 20);
        ObjectManager objects = metadata.objects();
        StreamManager streams = metadata.streams();
        log = new S3Storage(
                config,
                wal(identity.nodeId(), identity.nodeEpoch(), OpenMode.READ_WRITE),
                streams,
                objects,
                new StreamReaders(32 << 20, objects, storage, new DefaultObjectReaderFactory(storage), 1),
                storage,
                new StorageFailureHandlerChain());
        client = new S3StreamClient(streams, log, objects, storage, config);
        log.startup();
        failover.complete(new Failover(new Factory(), (wal, sm, om, logger) -> {
            try {
                log.recover(wal, sm, om, logger);
            } catch (Throwable error) {
                throw new IllegalStateException(error);
            }
        }));
    }

    static S3streamNode open(List<String> endpoints, ObjectStorage storage, int nodeId) {
        return new S3streamNode(endpoints, storage, Node.newProcess(nodeId));
    }

    /** Returns the store of a directory, which several processes share. s3stream compacts nothing in it. */
    static ObjectStorage directory(Path bucket) {
        return LocalFileObjectStorage.builder()
                .bucket(BucketURI.parse(LocalFileObjectStorage.BUCKET_ID + "@file://" + bucket))
                .build();
    }

    private WriteAheadLog wal(int nodeId, long nodeEpoch, OpenMode mode) {
        ObjectReservationService reservations = new ObjectReservationService(CLUSTER, storage, storage.bucketId());
        get(reservations.acquire(nodeId, nodeEpoch, mode == OpenMode.FAILOVER)); // fences former writers
        return new ObjectWALService(
                Time.SYSTEM,
                storage,
                ObjectWALConfig.builder()
                        .withURI(IdURI.parse(storage.bucketId() + "@" + WAL))
                        .withReservationService(reservations)
                        .withBatchInterval(5)
                        .withClusterId(CLUSTER)
                        .withNodeId(nodeId)
                        .withEpoch(nodeEpoch)
                        .withOpenMode(mode)
                        .build());
    }

    private final class Factory implements FailoverFactory {
        @Override
        public StreamManager getStreamManager(int nodeId, long epoch) {
            return metadata.streamsOf(new NodeIdentity(nodeId, epoch));
        }

        @Override
        public ObjectManager getObjectManager(int nodeId, long epoch) {
            return metadata.objectsOf(new NodeIdentity(nodeId, epoch));
        }

        @Override
        public WriteAheadLog getWal(FailoverRequest request) {
            return wal(request.getNodeId(), request.getNodeEpoch(), OpenMode.FAILOVER);
        }
    }

    AutomqMetadata metadata() {
        return metadata;
    }

    /** Returns the recovery of another node, once it is done. */
    CompletableFuture<FailoverRequest> recovered() {
        return recovered;
    }

    Stream create() {
        return get(client.createAndOpenStream(CreateStreamOptions.builder().epoch(1).build()));
    }

    Stream open(long streamId, long epoch) {
        return get(client.openStream(streamId, OpenStreamOptions.builder().epoch(epoch).build()));
    }

    void upload(Stream stream) {
        get(log.forceUpload(stream.streamId()));
    }

    /** Compacts the stream set objects, which takes a minute: s3stream limits its rate. */
    void compact() {
        withCompaction(compaction -> compaction.compact().join());
    }

    /** Splits the stream set objects into stream objects. */
    void split() {
        withCompaction(compaction -> Unthrottled.split(compaction, metadata.objects(), metadata.streams()));
    }

    private void withCompaction(Consumer<CompactionManager> action) {
        CompactionManager compaction =
                new CompactionManager(config, metadata.objects(), metadata.streams(), storage);
        try {
            action.accept(compaction);
        } finally {
            compaction.shutdown();
        }
    }

    void compact(Stream stream, StreamObjectCompactor.CompactionType type) {
        StreamObjectCompactor.builder()
                .objectManager(metadata.objects())
                .objectStorage(storage)
                .stream(stream)
                .groupSizeThreshold(1 << 20)
                .build()
                .compact(type);
    }

    int streamSetObjects() {
        return get(metadata.objects().getServerObjects()).size();
    }

    int streamObjects(Stream stream) {
        return get(metadata.objects().getStreamObjects(stream.streamId(), 0, -1, Integer.MAX_VALUE)).size();
    }

    @Override
    public void close() {
        client.shutdown();
        log.shutdown();
        metadata.close();
    }
}
