package kafka.controller.streamaspect.client.streammeta;

import kafka.controller.streamaspect.client.Context;
import org.apache.kafka.controller.stream.StreamClient;

/**
 * Factory that the controllers of Kafka in AutoMQ load by name. They keep topics and partitions. Of the bucket they need
 * what they need with {@code s3://}.
 */
public final class StreamClientFactory {
    private StreamClientFactory() {}

    /** Returns the client of a controller. */
    public static StreamClient get(Context context) {
        return kafka.controller.streamaspect.client.s3.StreamClientFactory.get(context);
    }
}
