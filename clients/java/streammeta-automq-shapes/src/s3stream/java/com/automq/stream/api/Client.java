package com.automq.stream.api;

import com.automq.stream.s3.failover.FailoverRequest;
import com.automq.stream.s3.failover.FailoverResponse;
import java.util.concurrent.CompletableFuture;

/** Shape of the client of s3stream. */
public interface Client {
    void start();

    void shutdown();

    StreamClient streamClient();

    KVClient kvClient();

    CompletableFuture<FailoverResponse> failover(FailoverRequest request);
}
