package kafka.server;

import kafka.server.metadata.KRaftMetadataCache;

/** Shape of a broker. */
public class BrokerServer {
    public KRaftMetadataCache metadataCache() {
        throw new UnsupportedOperationException();
    }
}
