import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.Callable;
import java.util.concurrent.CompletionException;
import java.util.concurrent.CompletionStage;
import java.util.concurrent.Semaphore;
import java.util.concurrent.TimeoutException;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager;
import org.apache.kafka.server.log.remote.storage.LogSegmentData;
import org.apache.kafka.server.log.remote.storage.RemoteLogMetadataManager;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentId;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata.CustomMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadataUpdate;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState;
import org.apache.kafka.server.log.remote.storage.RemoteResourceNotFoundException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageManager;

/** Loads of a broker with tiered storage, and the storage: a directory, the same for each manager of the metadata. */
public final class TieredLoad {
    private static final int SEGMENT_BYTES = 32 * 1024;
    /** Two records do not fit into a segment. */
    private static final byte[] RECORD = new byte[SEGMENT_BYTES * 3 / 5];

    private static final int STORED_AT_ONCE = 64;
    private static final long TIERED_WITHIN_S = 120;

    private TieredLoad() {}

    public static void main(String[] words) throws Exception {
        String topic = words[2];
        int partitions = Integer.parseInt(words[3]);
        int segments = Integer.parseInt(words[4]);
        try (Admin admin = Admin.create(Map.of("bootstrap.servers", words[1]))) {
            double seconds = words[0].equals("copy")
                    ? copy(admin, words[1], topic, partitions, segments)
                    : store(admin, topic, partitions, segments, words);
            System.out.println(seconds);
        }
        System.exit(0);
    }

    /** Returns the seconds from the moment a topic is tiered until all of its closed segments are. */
    private static double copy(Admin admin, String servers, String topic, int partitions, int segments)
            throws Exception {
        admin.createTopics(List.of(new NewTopic(topic, partitions, (short) 1)
                        .configs(Map.of("internal.segment.bytes", "" + SEGMENT_BYTES, "retention.ms", "-1"))))
                .all()
                .get();
        var serializer = new ByteArraySerializer();
        Map<String, Object> config = Map.of("bootstrap.servers", servers, "acks", "all", "batch.size", 0);
        try (var producer = new KafkaProducer<>(config, serializer, serializer)) {
            for (int number = 0; number <= segments; number++) {
                for (int partition = 0; partition < partitions; partition++) {
                    producer.send(new ProducerRecord<>(topic, partition, null, RECORD));
                }
            }
        }

        long began = System.nanoTime();
        admin.incrementalAlterConfigs(Map.of(
                        new ConfigResource(ConfigResource.Type.TOPIC, topic),
                        Map.of("remote.storage.enable", "true", "local.retention.bytes", "1").entrySet().stream()
                                .map(entry -> new AlterConfigOp(
                                        new ConfigEntry(entry.getKey(), entry.getValue()), AlterConfigOp.OpType.SET))
                                .toList()))
                .all()
                .get();
        waitForOffsets(admin, topic, partitions, OffsetSpec.latestTiered(), segments - 1);
        double seconds = (System.nanoTime() - began) / 1e9;
        waitForOffsets(admin, topic, partitions, OffsetSpec.earliestLocal(), segments);
        return seconds;
    }

    private static void waitForOffsets(Admin admin, String topic, int partitions, OffsetSpec kind, long offset)
            throws Exception {
        Map<TopicPartition, OffsetSpec> asked = IntStream.range(0, partitions)
                .mapToObj(partition -> new TopicPartition(topic, partition))
                .collect(Collectors.toMap(partition -> partition, partition -> kind));
        long began = System.nanoTime();
        while (admin.listOffsets(asked).all().get().values().stream().anyMatch(found -> found.offset() < offset)) {
            if (System.nanoTime() - began > TIERED_WITHIN_S * 1_000_000_000L) {
                throw new TimeoutException(kind + " is not " + offset + " after " + TIERED_WITHIN_S + " s");
            }
            Thread.sleep(20);
        }
    }

    /** Returns the seconds in which a manager stores finished copies of segments. */
    private static double store(Admin admin, String topic, int partitions, int segments, String[] words)
            throws Exception {
        Uuid topicId = admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic).topicId();
        List<TopicIdPartition> owned = IntStream.range(0, partitions)
                .mapToObj(partition -> new TopicIdPartition(topicId, new TopicPartition(topic, partition)))
                .toList();
        Map<String, String> config = new HashMap<>();
        for (int at = 6; at < words.length; at++) {
            config.put(words[at].split("=")[0], words[at].split("=")[1]);
        }
        try (var manager = (RemoteLogMetadataManager) Class.forName(words[5]).getConstructor().newInstance()) {
            manager.configure(config);
            if (manager instanceof TopicBasedRemoteLogMetadataManager topicBased) {
                topicBased.onBrokerReady();
            }
            manager.onPartitionLeadershipChanges(Set.copyOf(owned), Set.of());
            while (!owned.stream().allMatch(manager::isReady)) {
                Thread.sleep(50);
            }

            long began = System.nanoTime();
            var inFlight = new Semaphore(STORED_AT_ONCE);
            for (int number = 0; number < segments; number++) {
                RemoteLogSegmentMetadata started = started(owned.get(number % partitions), 1_000_000 + number);
                inFlight.acquire();
                manager.addRemoteLogSegmentMetadata(started)
                        .thenCompose(none -> finish(manager, started))
                        .whenComplete((none, error) -> {
                            if (error != null) {
                                error.printStackTrace();
                                System.exit(1);
                            }
                            inFlight.release();
                        });
            }
            inFlight.acquire(STORED_AT_ONCE);
            return (System.nanoTime() - began) / 1e9;
        }
    }

    private static RemoteLogSegmentMetadata started(TopicIdPartition partition, long start) {
        long now = System.currentTimeMillis();
        return new RemoteLogSegmentMetadata(
                RemoteLogSegmentId.generateNew(partition), start, start, now, 1, now, RECORD.length,
                Map.of(0, start));
    }

    private static CompletionStage<Void> finish(
            RemoteLogMetadataManager manager, RemoteLogSegmentMetadata started) {
        try {
            return manager.updateRemoteLogSegmentMetadata(new RemoteLogSegmentMetadataUpdate(
                    started.remoteLogSegmentId(), System.currentTimeMillis(), Optional.empty(),
                    RemoteLogSegmentState.COPY_SEGMENT_FINISHED, 1));
        } catch (Exception error) {
            throw new CompletionException(error);
        }
    }

    /** Segments as files of a directory. */
    public static final class Storage implements RemoteStorageManager {
        private Path directory;

        @Override
        public void configure(Map<String, ?> configs) {
            directory = Path.of(configs.get("dir").toString());
        }

        @Override
        public Optional<CustomMetadata> copyLogSegmentData(RemoteLogSegmentMetadata metadata, LogSegmentData data)
                throws RemoteStorageException {
            return run(() -> {
                Files.createDirectories(directory.resolve(metadata.remoteLogSegmentId().id().toString()));
                Files.copy(data.logSegment(), file(metadata, "RECORDS"));
                Files.copy(data.offsetIndex(), file(metadata, IndexType.OFFSET));
                Files.copy(data.timeIndex(), file(metadata, IndexType.TIMESTAMP));
                Files.copy(data.producerSnapshotIndex(), file(metadata, IndexType.PRODUCER_SNAPSHOT));
                Files.write(file(metadata, IndexType.LEADER_EPOCH), data.leaderEpochIndex().array());
                return Optional.empty();
            });
        }

        private Path file(RemoteLogSegmentMetadata metadata, Object name) {
            return directory.resolve(metadata.remoteLogSegmentId().id() + "/" + name);
        }

        private static <T> T run(Callable<T> work) throws RemoteStorageException {
            try {
                return work.call();
            } catch (Exception error) {
                throw new RemoteStorageException(error);
            }
        }

        @Override
        public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int start)
                throws RemoteStorageException {
            return run(() -> {
                InputStream input = Files.newInputStream(file(metadata, "RECORDS"));
                input.skipNBytes(start);
                return input;
            });
        }

        @Override
        public InputStream fetchLogSegment(RemoteLogSegmentMetadata metadata, int start, int end)
                throws RemoteStorageException {
            return fetchLogSegment(metadata, start); // the broker stops reading at the end
        }

        @Override
        public InputStream fetchIndex(RemoteLogSegmentMetadata metadata, IndexType type)
                throws RemoteStorageException {
            Path file = file(metadata, type);
            if (!Files.exists(file)) {
                throw new RemoteResourceNotFoundException("no index " + type);
            }
            return run(() -> Files.newInputStream(file));
        }

        @Override
        public void deleteLogSegmentData(RemoteLogSegmentMetadata metadata) {}

        @Override
        public void close() {}
    }
}
