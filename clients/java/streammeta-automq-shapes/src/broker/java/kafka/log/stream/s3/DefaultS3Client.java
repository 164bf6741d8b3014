package kafka.log.stream.s3;

import com.automq.stream.api.Client;
import com.automq.stream.api.KVClient;
import com.automq.stream.api.StreamClient;
import com.automq.stream.s3.Config;
import com.automq.stream.s3.failover.FailoverRequest;
import com.automq.stream.s3.failover.FailoverResponse;
import com.automq.stream.s3.objects.ObjectManager;
import com.automq.stream.s3.streams.StreamManager;
import java.util.concurrent.CompletableFuture;
import kafka.server.BrokerServer;

/** Shape of AutoMQ's client over S3. */
public class DefaultS3Client implements Client {
    protected final Config config;
    protected KVClient kvClient;

    public DefaultS3Client(BrokerServer brokerServer, Config config) {
        this.config = config;
    }

    @Override
    public void start() {}

    @Override
    public void shutdown() {}

    @Override
    public StreamClient streamClient() {
        throw new UnsupportedOperationException();
    }

    @Override
    public KVClient kvClient() {
        return kvClient;
    }

    @Override
    public CompletableFuture<FailoverResponse> failover(FailoverRequest request) {
        throw new UnsupportedOperationException();
    }

    protected StreamManager newStreamManager(int nodeId, long nodeEpoch, boolean failoverMode) {
        throw new UnsupportedOperationException();
    }

    protected ObjectManager newObjectManager(int nodeId, long nodeEpoch, boolean failoverMode) {
        throw new UnsupportedOperationException();
    }
}
