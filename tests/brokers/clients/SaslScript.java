import java.time.Duration;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutionException;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Kafka's Java client that authenticates by SASL/PLAIN: produces and reads; prints one JSON object.
 *
 * <p>Arguments: servers, file of the authorities, user, password.
 */
public final class SaslScript {
    private static final String TOPIC = "sasl-java";

    private SaslScript() {}

    public static void main(String[] words) throws Exception {
        Properties settings = new Properties();
        settings.put("bootstrap.servers", words[0]);
        settings.put("security.protocol", "SASL_SSL");
        settings.put("ssl.truststore.type", "PEM");
        settings.put("ssl.truststore.location", words[1]);
        settings.put("sasl.mechanism", "PLAIN");
        settings.put("sasl.jaas.config", "org.apache.kafka.common.security.plain.PlainLoginModule"
                + " required username=\"" + words[2] + "\" password=\"" + words[3] + "\";");
        settings.put("group.id", TOPIC);
        settings.put("group.protocol", "classic");
        settings.put("auto.offset.reset", "earliest");
        StringSerializer writes = new StringSerializer();
        try (var producer = new KafkaProducer<>(settings, writes, writes)) {
            producer.send(new ProducerRecord<>(TOPIC, "value")).get();
        } catch (ExecutionException error) {
            String name = error.getCause().getClass().getSimpleName();
            System.out.println("{\"error\": \"" + name + "\"}");
            return;
        }
        StringDeserializer reads = new StringDeserializer();
        try (var consumer = new KafkaConsumer<>(settings, reads, reads)) {
            consumer.subscribe(List.of(TOPIC));
            long deadline = System.currentTimeMillis() + 30_000;
            while (System.currentTimeMillis() < deadline) {
                for (var one : consumer.poll(Duration.ofMillis(200))) {
                    System.out.println("{\"left\": 0, \"read\": [\"" + one.value() + "\"]}");
                    return;
                }
            }
        }
    }
}
