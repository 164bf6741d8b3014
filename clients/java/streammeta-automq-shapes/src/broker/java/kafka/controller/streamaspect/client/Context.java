package kafka.controller.streamaspect.client;

import kafka.server.KafkaConfig;

/** Shape of what a stream client factory of a controller receives. */
public class Context {
    public KafkaConfig kafkaConfig;
}
