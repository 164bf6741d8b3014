import com.automq.stream.Version;
import com.automq.stream.api.CreateStreamOptions;
import com.automq.stream.api.RecordBatch;
import com.automq.stream.api.Stream;
import com.automq.stream.s3.Config;
import com.automq.stream.s3.S3Storage;
import com.automq.stream.s3.S3StreamClient;
import com.automq.stream.s3.cache.blockcache.DefaultObjectReaderFactory;
import com.automq.stream.s3.cache.blockcache.StreamReaders;
import com.automq.stream.s3.failover.StorageFailureHandlerChain;
import com.automq.stream.s3.memory.MemoryMetadataManager;
import com.automq.stream.s3.metadata.ObjectUtils;
import com.automq.stream.s3.objects.ObjectManager;
import com.automq.stream.s3.operator.BucketURI;
import com.automq.stream.s3.operator.LocalFileObjectStorage;
import com.automq.stream.s3.operator.ObjectStorage;
import com.automq.stream.s3.streams.StreamManager;
import com.automq.stream.s3.wal.OpenMode;
import com.automq.stream.s3.wal.impl.object.ObjectReservationService;
import com.automq.stream.s3.wal.impl.object.ObjectWALConfig;
import com.automq.stream.s3.wal.impl.object.ObjectWALService;
import com.automq.stream.utils.IdURI;
import com.automq.stream.utils.Time;
import io.streammeta.automq.AutomqMetadata;
import io.streammeta.automq.ElasticStreamEndpoint;
import io.streammeta.automq.HostErrors;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionOptions;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.Semaphore;

/** Appends to streams of AutoMQ's s3stream, with the controllers and with its own metadata in memory, in turns. */
public final class S3streamLoad {
    private static final int STREAMS = 16;
    private static final int BATCH_BYTES = 4096;
    private static final int IN_FLIGHT = 256;
    private static final String WAL = "s3://wal";

    private S3streamLoad() {}

    private record Batch(ByteBuffer rawPayload) implements RecordBatch {
        @Override
        public int count() {
            return 1;
        }

        @Override
        public long baseTimestamp() {
            return 0;
        }

        @Override
        public Map<String, String> properties() {
            return Map.of();
        }
    }

    /** Arguments: endpoints, separated by commas, a directory, appends of a turn, turns. */
    public static void main(String[] words) throws Exception {
        var endpoint = ElasticStreamEndpoint.parse("streammeta://" + words[0]);
        var node = new NodeIdentity(101, System.currentTimeMillis());
        AutomqMetadata metadata = AutomqMetadata.open(endpoint, node, SessionOptions.DEFAULT, HostErrors.NONE);
        ObjectUtils.setNamespace(metadata.objectNamespace());
        var memory = new MemoryMetadataManager();
        List<Stream> ours = streams(Path.of(words[1], "controllers"), node, metadata.streams(), metadata.objects());
        List<Stream> peer = streams(Path.of(words[1], "memory"), node, memory, memory);

        int appends = Integer.parseInt(words[2]);
        append(ours, appends); // a warm-up, which the memory's turns profit from, too
        append(peer, appends);
        for (int turn = 0; turn < Integer.parseInt(words[3]); turn++) {
            System.out.println("controllers " + append(ours, appends));
            System.out.println("memory " + append(peer, appends));
        }
        System.exit(0);
    }

    private static List<Stream> streams(Path directory, NodeIdentity node, StreamManager streams, ObjectManager objects) {
        directory.toFile().mkdirs();
        ObjectStorage storage = LocalFileObjectStorage.builder()
                .bucket(BucketURI.parse(LocalFileObjectStorage.BUCKET_ID + "@file://" + directory))
                .build();
        var reservations = new ObjectReservationService("bench", storage, storage.bucketId());
        reservations.acquire(node.nodeId(), node.nodeEpoch(), false).join();
        var wal = new ObjectWALService(
                Time.SYSTEM,
                storage,
                ObjectWALConfig.builder()
                        .withURI(IdURI.parse(storage.bucketId() + "@" + WAL))
                        .withReservationService(reservations)
                        .withBatchInterval(5)
                        .withClusterId("bench")
                        .withNodeId(node.nodeId())
                        .withEpoch(node.nodeEpoch())
                        .withOpenMode(OpenMode.READ_WRITE)
                        .build());
        Config config = new Config()
                .nodeId(node.nodeId())
                .nodeEpoch(node.nodeEpoch())
                .version(() -> Version.LATEST)
                .walCacheSize(128 << 20)
                .walUploadThreshold(16 << 20)
                .blockCacheSize(32 << 20);
        var readers = new StreamReaders(32 << 20, objects, storage, new DefaultObjectReaderFactory(storage), 1);
        var log = new S3Storage(config, wal, streams, objects, readers, storage, new StorageFailureHandlerChain());
        var client = new S3StreamClient(streams, log, objects, storage, config);
        log.startup();

        List<Stream> created = new ArrayList<>();
        for (int row = 0; row < STREAMS; row++) {
            created.add(client.createAndOpenStream(
                            CreateStreamOptions.builder().epoch(1).build())
                    .join());
        }
        return created;
    }

    /** Returns the seconds of all appends, and then the 50th and the 99th percentile of the milliseconds of one. */
    private static String append(List<Stream> streams, int count) throws InterruptedException {
        byte[] bytes = new byte[BATCH_BYTES];
        new Random(7).nextBytes(bytes);
        long[] nanos = new long[count];
        var inFlight = new Semaphore(IN_FLIGHT);
        long began = System.nanoTime();
        for (int at = 0; at < count; at++) {
            inFlight.acquire();
            int number = at;
            long sent = System.nanoTime();
            streams.get(at % STREAMS).append(new Batch(ByteBuffer.wrap(bytes))).whenComplete((result, error) -> {
                if (error != null) {
                    error.printStackTrace();
                    System.exit(1);
                }
                nanos[number] = System.nanoTime() - sent;
                inFlight.release();
            });
        }
        inFlight.acquire(IN_FLIGHT);
        double seconds = (System.nanoTime() - began) / 1e9;
        Arrays.sort(nanos);
        return seconds + " " + nanos[count / 2] / 1e6 + " " + nanos[count * 99 / 100] / 1e6;
    }
}
