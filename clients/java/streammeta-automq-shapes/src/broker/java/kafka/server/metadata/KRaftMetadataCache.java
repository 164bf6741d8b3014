package kafka.server.metadata;

import org.apache.kafka.server.common.automq.AutoMQVersion;

/** Shape of a broker's view of Kafka's metadata. */
public class KRaftMetadataCache {
    public AutoMQVersion autoMQVersion() {
        throw new UnsupportedOperationException();
    }
}
