package kafka.log.streamaspect.client;

import kafka.server.BrokerServer;
import kafka.server.KafkaConfig;

/** Shape of what a client factory receives. */
public class Context {
    public KafkaConfig config;
    public BrokerServer brokerServer;
}
