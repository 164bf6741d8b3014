package io.streammeta.kafka;

import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import io.streammeta.testkit.Waiting;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Random;
import java.util.Set;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.ElectionType;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfSystemProperty;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.io.TempDir;

/** Stock brokers from Maven Central, with the released jar. The build runs it once the jar is there. */
@EnabledIfSystemProperty(named = "plugin.jar", matches = ".+")
class StockBrokerTest {
    private static final String TOPIC = "topic";
    private static final TopicPartition PARTITION = new TopicPartition(TOPIC, 0);
    private static final int RECORDS = 20_000;
    private static final int RECORDS_AFTER_MOVE = 3_000;
    private static final int RECORD_BYTES = 1_000;

    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    @TempDir
    Path folder;

    private String addresses;

    @Test
    void everyRecordIsReadFromTheBucketAfterAFailoverAndNothingOfADeletedTopicStays() throws Exception {
        int controllerPort = Waiting.freePort();
        String endpoints = String.join(",", CONTROLLERS.endpoints());
        try (var first = new KafkaProcess(1, controllerPort, endpoints, CONTROLLERS.bucket(), folder.resolve("1"));
                var second = new KafkaProcess(2, controllerPort, endpoints, CONTROLLERS.bucket(), folder.resolve("2"));
                var client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            first.start();
            second.start();
            addresses = first.address() + "," + second.address();
            try (Admin admin = Admin.create(Map.of("bootstrap.servers", addresses))) {
                Waiting.until("two brokers", () -> admin.describeCluster().nodes().get().size() == 2);
                createTopic(admin);
                int leader = await(client.describeCluster()).leaderId().orElseThrow();
                produce(0, RECORDS / 2);
                CONTROLLERS.kill(leader);
                produce(RECORDS / 2, RECORDS);
                CONTROLLERS.start(leader);
                waitUntilLocalStart(admin, RECORDS - 3_000);
                consume(0, RECORDS);

                // The leader is lost with its disk. The other broker goes on, and copies what is left.
                second.kill();
                second.deleteLocalFiles();
                Waiting.until("leader 1", () -> leader(admin) == 1);
                produce(RECORDS, RECORDS + RECORDS_AFTER_MOVE);
                waitUntilLocalStart(admin, RECORDS);
                consume(0, RECORDS + RECORDS_AFTER_MOVE);

                // The lost broker begins with an empty disk, and leads again.
                second.start();
                Waiting.until("both in sync", () -> description(admin).isr().size() == 2);
                admin.electLeaders(ElectionType.PREFERRED, Set.of(PARTITION)).all().get();
                Waiting.until("leader 2", () -> leader(admin) == 2);
                consume(0, RECORDS + RECORDS_AFTER_MOVE);

                int before = keys(client);
                admin.deleteRecords(Map.of(PARTITION, RecordsToDelete.beforeOffset(10_000))).all().get();
                Waiting.until("segments deleted", () -> keys(client) <= before - 8);
                consume(10_000, RECORDS + RECORDS_AFTER_MOVE);

                admin.deleteTopics(List.of(TOPIC)).all().get();
                Waiting.until("no key and no object", () -> keys(client) == 0 && objects(client) == 0);
            } catch (Throwable error) {
                // The log ends with the test's folder.
                System.err.println(tail(first) + tail(second));
                throw error;
            }
        }
    }

    private static String tail(KafkaProcess broker) throws Exception {
        List<String> lines = broker.log().lines()
                .filter(line -> line.contains("ERROR") || line.contains("WARN") || line.contains("Exception"))
                .toList();
        return broker + ":\n" + String.join("\n", lines.subList(Math.max(0, lines.size() - 40), lines.size())) + "\n";
    }

    private void createTopic(Admin admin) throws Exception {
        admin.createTopics(List.of(new NewTopic(TOPIC, Map.of(0, List.of(2, 1)))
                        .configs(Map.of(
                                "remote.storage.enable", "true",
                                "segment.bytes", "1048576",
                                "local.retention.bytes", "1",
                                "file.delete.delay.ms", "100"))))
                .all()
                .get();
    }

    private static byte[] value(int number) {
        byte[] value = new byte[RECORD_BYTES];
        new Random(number).nextBytes(value);
        return ByteBuffer.wrap(value).putInt(number).array();
    }

    private void produce(int from, int to) throws Exception {
        Map<String, Object> config = Map.of("bootstrap.servers", addresses, "acks", "all", "linger.ms", 5);
        var serializer = new ByteArraySerializer();
        try (var producer = new KafkaProducer<>(config, serializer, serializer)) {
            Future<RecordMetadata> last = null;
            for (int number = from; number < to; number++) {
                last = producer.send(new ProducerRecord<>(TOPIC, 0, null, value(number)));
            }
            assertEquals(to - 1, last.get().offset());
        }
    }

    private void consume(int from, int to) {
        var deserializer = new ByteArrayDeserializer();
        Map<String, Object> config = Map.of("bootstrap.servers", addresses, "auto.offset.reset", "none");
        try (var consumer = new KafkaConsumer<>(config, deserializer, deserializer)) {
            consumer.assign(List.of(PARTITION));
            consumer.seek(PARTITION, from);
            long deadline = System.nanoTime() + Duration.ofSeconds(120).toNanos();
            int next = from;
            while (next < to && System.nanoTime() < deadline) {
                for (var found : consumer.poll(Duration.ofMillis(500))) {
                    assertEquals(next, found.offset());
                    assertTrue(Arrays.equals(value(next), found.value()), "content of record " + next);
                    next++;
                }
            }
            assertEquals(to, next);
        }
    }

    private static void waitUntilLocalStart(Admin admin, long offset) throws Exception {
        Waiting.until("local segments below " + offset + " deleted", () -> offset
                <= admin.listOffsets(Map.of(PARTITION, OffsetSpec.earliestLocal())).all().get().get(PARTITION).offset());
    }

    private static org.apache.kafka.common.TopicPartitionInfo description(Admin admin) throws Exception {
        return admin.describeTopics(List.of(TOPIC)).allTopicNames().get().get(TOPIC).partitions().get(0);
    }

    private static int leader(Admin admin) throws Exception {
        return Optional.ofNullable(description(admin).leader()).map(node -> node.id()).orElse(-1);
    }

    private static int keys(StreammetaClient client) {
        return await(client.keyValues("kafka-tiered").listKeys("").toList()).size();
    }

    private static int objects(StreammetaClient client) {
        return await(client.namedObjects().list("kafka-tiered/").toList()).size();
    }
}
