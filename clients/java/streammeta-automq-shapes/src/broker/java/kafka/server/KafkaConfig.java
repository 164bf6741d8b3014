package kafka.server;

/** Shape of a broker's configuration. */
public class KafkaConfig {
    public String elasticStreamEndpoint() {
        throw new UnsupportedOperationException();
    }
}
