import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.File;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.config.ConfigResource;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;

/**
 * Runs the operations of a file by Kafka's Java client; prints one JSON array, a result for each.
 *
 * <p>Arguments: bootstrap servers, and the file. An operation that fails gives the name of its error.
 */
public final class OracleScript {
    private static final Duration TURN = Duration.ofMillis(100);
    private static final long PATIENCE_MS = 60_000;

    private final String servers;
    private final Admin admin;

    private OracleScript(String servers) {
        this.servers = servers;
        this.admin = Admin.create(properties());
    }

    public static void main(String[] words) throws Exception {
        ObjectMapper json = new ObjectMapper();
        OracleScript script = new OracleScript(words[0]);
        List<Object> results = new ArrayList<>();
        for (JsonNode each : json.readTree(new File(words[1]))) {
            try {
                results.add(each.has("until") ? script.repeated(each) : script.run(each));
            } catch (ExecutionException error) {
                results.add(Map.of("error", error.getCause().getClass().getSimpleName()));
            } catch (RuntimeException error) {
                results.add(Map.of("error", error.getClass().getSimpleName()));
            }
        }
        script.admin.close();
        System.out.println(json.writeValueAsString(results));
    }

    /** Returns the result once it is the one that is waited for, or the last. */
    private Object repeated(JsonNode asked) throws Exception {
        long deadline = System.currentTimeMillis() + PATIENCE_MS;
        Object found = null;
        while (System.currentTimeMillis() < deadline) {
            try {
                found = run(asked);
            } catch (ExecutionException error) {
                found = error.toString();
            }
            if (String.valueOf(found).equals(asked.get("until").asText())) {
                break;
            }
            Thread.sleep(TURN.toMillis());
        }
        return found;
    }

    private Object run(JsonNode asked) throws Exception {
        String topic = asked.path("topic").asText();
        switch (asked.get("op").asText()) {
            case "create":
                return create(topic, asked);
            case "delete":
                admin.deleteTopics(List.of(topic)).all().get();
                return "done";
            case "grow":
                Map<String, NewPartitions> wanted =
                        Map.of(topic, NewPartitions.increaseTo(asked.get("partitions").asInt()));
                admin.createPartitions(wanted).all().get();
                return "done";
            case "describe":
                return admin.describeTopics(List.of(topic)).allTopicNames().get().get(topic)
                        .partitions().size();
            case "configs":
                return configs(topic, asked.get("names"));
            case "brokers":
                return admin.describeCluster().nodes().get().size();
            case "produce":
                return produce(topic, asked);
            case "consume":
                return consume(topic, asked);
            case "offset":
                return offset(topic, asked);
            case "delete_records":
                TopicPartition place = place(topic, asked);
                RecordsToDelete below = RecordsToDelete.beforeOffset(asked.get("before").asLong());
                return admin.deleteRecords(Map.of(place, below)).lowWatermarks().get(place).get()
                        .lowWatermark();
            case "group":
                return group(topic, asked);
            case "committed":
                return committed(topic, asked);
            case "group_state":
                String name = asked.get("group").asText();
                return admin.describeConsumerGroups(List.of(name)).all().get().get(name)
                        .groupState().toString();
            default:
                throw new IllegalArgumentException("unknown operation " + asked);
        }
    }

    private Object create(String topic, JsonNode asked) throws Exception {
        Map<String, String> configs = new TreeMap<>();
        asked.path("configs").properties().forEach(
                one -> configs.put(one.getKey(), one.getValue().asText()));
        NewTopic wanted = new NewTopic(topic, asked.get("partitions").asInt(), (short) 1);
        admin.createTopics(List.of(wanted.configs(configs))).all().get();
        return "done";
    }

    private Object configs(String topic, JsonNode names) throws Exception {
        ConfigResource resource = new ConfigResource(ConfigResource.Type.TOPIC, topic);
        Map<String, String> found = new TreeMap<>();
        var described = admin.describeConfigs(List.of(resource)).all().get().get(resource);
        names.forEach(one -> found.put(one.asText(), described.get(one.asText()).value()));
        return found;
    }

    private Object produce(String topic, JsonNode asked) throws Exception {
        Properties settings = properties();
        settings.put("acks", asked.get("acks").asText());
        settings.put("compression.type", asked.get("compression").asText());
        settings.put("enable.idempotence", asked.path("idempotent").asText("false"));
        settings.put("linger.ms", "20");
        List<Object> offsets = new ArrayList<>();
        try (var producer = new KafkaProducer<>(
                settings, new ByteArraySerializer(), new ByteArraySerializer())) {
            List<Future<RecordMetadata>> sent = new ArrayList<>();
            Integer partition = asked.has("partition") ? asked.get("partition").asInt() : null;
            for (JsonNode one : asked.get("records")) {
                byte[] value = one.get(2).isNull() ? null : one.get(2).asText().getBytes();
                sent.add(producer.send(new ProducerRecord<>(
                        topic, partition, one.get(0).asLong(), one.get(1).asText().getBytes(), value)));
            }
            for (Future<RecordMetadata> one : sent) {
                offsets.add(List.of(one.get().partition(), one.get().offset()));
            }
        }
        return offsets;
    }

    private Object consume(String topic, JsonNode asked) {
        TopicPartition place = place(topic, asked);
        List<Object> seen = new ArrayList<>();
        try (var consumer = consumer(null)) {
            consumer.assign(List.of(place));
            if (asked.has("from")) {
                consumer.seek(place, asked.get("from").asLong());
            } else {
                consumer.seekToBeginning(List.of(place));
            }
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            int count = asked.get("count").asInt();
            while (seen.size() < count && System.currentTimeMillis() < deadline) {
                for (ConsumerRecord<byte[], byte[]> one : consumer.poll(TURN)) {
                    seen.add(row(one));
                }
            }
        }
        return seen;
    }

    private Object offset(String topic, JsonNode asked) throws Exception {
        TopicPartition place = place(topic, asked);
        JsonNode at = asked.get("at");
        OffsetSpec wanted = at.isNumber() ? OffsetSpec.forTimestamp(at.asLong())
                : at.asText().equals("earliest") ? OffsetSpec.earliest() : OffsetSpec.latest();
        var found = admin.listOffsets(Map.of(place, wanted)).partitionResult(place).get();
        return List.of(found.offset(), found.timestamp(), found.leaderEpoch().orElse(-1));
    }

    private Object group(String topic, JsonNode asked) {
        String name = asked.get("group").asText();
        int count = asked.get("count").asInt();
        int partitions = asked.get("partitions").asInt();
        Map<String, Object> seen = new TreeMap<>();
        List<Integer> shares = new ArrayList<>();
        try (var first = consumer(name); var second = consumer(name)) {
            first.subscribe(List.of(topic));
            second.subscribe(List.of(topic));
            long deadline = System.currentTimeMillis() + PATIENCE_MS;
            Set<TopicPartition> owned = new HashSet<>();
            while (System.currentTimeMillis() < deadline) {
                for (var member : List.of(first, second)) {
                    member.poll(TURN).forEach(
                            one -> seen.put(one.partition() + "/" + one.offset(), row(one)));
                }
                owned.clear();
                owned.addAll(first.assignment());
                owned.addAll(second.assignment());
                boolean isShared = first.assignment().size() < partitions
                        && second.assignment().size() < partitions && owned.size() == partitions;
                if (isShared && position(first) + position(second) == count) {
                    break;
                }
            }
            for (var member : List.of(first, second)) {
                shares.add(member.assignment().size());
                member.commitSync();
            }
        }
        shares.sort(null);
        return Map.of("shares", shares, "seen", seen);
    }

    private static long position(KafkaConsumer<byte[], byte[]> member) {
        return member.assignment().stream().mapToLong(member::position).sum();
    }

    private Object committed(String topic, JsonNode asked) throws Exception {
        Map<Integer, Long> found = new TreeMap<>();
        admin.listConsumerGroupOffsets(asked.get("group").asText())
                .partitionsToOffsetAndMetadata().get()
                .forEach((place, one) -> found.put(place.partition(), one.offset()));
        return found;
    }

    private KafkaConsumer<byte[], byte[]> consumer(String group) {
        Properties settings = properties();
        settings.put("auto.offset.reset", group == null ? "none" : "earliest");
        settings.put("enable.auto.commit", "false");
        settings.put("group.protocol", "classic");
        if (group != null) {
            settings.put("group.id", group);
            settings.put("session.timeout.ms", "10000");
        }
        return new KafkaConsumer<>(
                settings, new ByteArrayDeserializer(), new ByteArrayDeserializer());
    }

    private Properties properties() {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", servers);
        settings.put("default.api.timeout.ms", "30000");
        settings.put("request.timeout.ms", "20000");
        return settings;
    }

    private static TopicPartition place(String topic, JsonNode asked) {
        return new TopicPartition(topic, asked.get("partition").asInt());
    }

    private static List<Object> row(ConsumerRecord<byte[], byte[]> one) {
        String value = one.value() == null ? "(null)" : new String(one.value());
        return List.of(one.offset(), one.timestamp(), new String(one.key()), value,
                one.leaderEpoch().orElse(-1));
    }
}
