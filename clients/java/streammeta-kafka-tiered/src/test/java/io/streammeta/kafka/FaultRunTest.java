package io.streammeta.kafka;

import io.streammeta.testkit.FaultRun;
import io.streammeta.testkit.FaultyBroker;
import io.streammeta.testkit.Waiting;
import java.time.Duration;
import java.util.List;
import java.util.Map;
import java.util.function.Predicate;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfSystemProperty;

/** Two stock brokers that share a partition, in a fault run. They are killed by turns. */
@EnabledIfSystemProperty(named = "plugin.jar", matches = ".+")
class FaultRunTest {
    private static final TopicPartition PARTITION = new TopicPartition("topic", 0);
    private static final Duration PATIENCE = Duration.ofMinutes(2);

    @Test
    void serve() throws Exception {
        FaultRun.serve("kafka", Brokers::new);
    }

    private static final class Brokers implements FaultyBroker {
        private final List<KafkaProcess> brokers;
        private final Admin admin;
        private final KafkaProducer<byte[], byte[]> producer;
        private int kills;
        private long end;

        Brokers(FaultRun.World world) throws Exception {
            int controllerPort = Waiting.freePort();
            brokers = List.of(broker(1, controllerPort, world), broker(2, controllerPort, world));
            for (KafkaProcess broker : brokers) {
                broker.start();
            }
            admin = Admin.create(config());
            Waiting.until("two brokers", () -> admin.describeCluster().nodes().get().size() == 2);
            admin.createTopics(List.of(new NewTopic(PARTITION.topic(), Map.of(0, List.of(2, 1)))
                            .configs(Map.of(
                                    "remote.storage.enable", "true",
                                    "segment.bytes", "1048576",
                                    "local.retention.bytes", "1",
                                    "file.delete.delay.ms", "100"))))
                    .all()
                    .get();
            producer = new KafkaProducer<>(config(), new ByteArraySerializer(), new ByteArraySerializer());
        }

        private static KafkaProcess broker(int nodeId, int controllerPort, FaultRun.World world) throws Exception {
            return new KafkaProcess(
                    nodeId, controllerPort, world.endpoints(), world.bucket(), world.folder().resolve("" + nodeId));
        }

        private Map<String, Object> config() {
            String addresses = brokers.get(0).address() + "," + brokers.get(1).address();
            return Map.of("bootstrap.servers", addresses, "auto.offset.reset", "none", "acks", "all");
        }

        @Override
        public void kill() throws Exception {
            brokers.get(++kills % 2).kill();
        }

        @Override
        public void start() throws Exception {
            brokers.get(kills % 2).start();
        }

        @Override
        public void write(byte[] message) throws Exception {
            end = producer.send(new ProducerRecord<>(PARTITION.topic(), 0, null, message)).get().offset() + 1;
        }

        /** Fills segments until all others are copied, and deleted here. */
        @Override
        public void settle() throws Exception {
            long last = end;
            for (int number = 0; number < 2_000; number++) {
                write(FaultRun.FILLER);
            }
            Waiting.until("local segments below " + last + " deleted", () -> last <= offset(OffsetSpec.earliestLocal()));
        }

        private long offset(OffsetSpec which) throws Exception {
            return admin.listOffsets(Map.of(PARTITION, which)).all().get().get(PARTITION).offset();
        }

        @Override
        public void read(Predicate<byte[]> reader) {
            var deserializer = new ByteArrayDeserializer();
            try (var consumer = new KafkaConsumer<>(config(), deserializer, deserializer)) {
                consumer.assign(List.of(PARTITION));
                consumer.seek(PARTITION, 0);
                long until = System.nanoTime() + PATIENCE.toNanos();
                boolean wantsMore = true;
                while (wantsMore && System.nanoTime() < until) {
                    for (var found : consumer.poll(Duration.ofMillis(500))) {
                        wantsMore = reader.test(found.value());
                    }
                }
            }
        }

        @Override
        public void close() throws Exception {
            producer.close(Duration.ZERO);
            admin.close(Duration.ZERO);
            for (KafkaProcess broker : brokers) {
                broker.kill();
            }
        }
    }
}
