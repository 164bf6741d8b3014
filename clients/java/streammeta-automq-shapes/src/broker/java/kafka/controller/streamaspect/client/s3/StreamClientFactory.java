package kafka.controller.streamaspect.client.s3;

import kafka.controller.streamaspect.client.Context;
import org.apache.kafka.controller.stream.StreamClient;

/** Shape of AutoMQ's factory of a controller's stream client. */
public class StreamClientFactory {
    public static StreamClient get(Context context) {
        throw new UnsupportedOperationException();
    }
}
