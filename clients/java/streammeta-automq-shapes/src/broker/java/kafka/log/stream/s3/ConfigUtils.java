package kafka.log.stream.s3;

import com.automq.stream.s3.Config;
import kafka.server.KafkaConfig;

/** Shape of the translation of a broker's configuration. */
public class ConfigUtils {
    public static Config to(KafkaConfig config) {
        throw new UnsupportedOperationException();
    }
}
