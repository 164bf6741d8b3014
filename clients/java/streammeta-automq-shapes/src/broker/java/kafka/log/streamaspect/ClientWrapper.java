package kafka.log.streamaspect;

import com.automq.stream.api.Client;
import com.automq.stream.api.KVClient;
import com.automq.stream.api.StreamClient;
import com.automq.stream.s3.failover.FailoverRequest;
import com.automq.stream.s3.failover.FailoverResponse;
import java.util.concurrent.CompletableFuture;

/** Shape of the client that a broker uses. */
public class ClientWrapper implements Client {
    public ClientWrapper(Client client) {}

    @Override
    public void start() {
        throw new UnsupportedOperationException();
    }

    @Override
    public void shutdown() {
        throw new UnsupportedOperationException();
    }

    @Override
    public StreamClient streamClient() {
        throw new UnsupportedOperationException();
    }

    @Override
    public KVClient kvClient() {
        throw new UnsupportedOperationException();
    }

    @Override
    public CompletableFuture<FailoverResponse> failover(FailoverRequest request) {
        throw new UnsupportedOperationException();
    }
}
