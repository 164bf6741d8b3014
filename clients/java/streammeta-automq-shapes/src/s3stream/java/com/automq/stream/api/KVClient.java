package com.automq.stream.api;

import java.util.concurrent.CompletableFuture;

/** Shape of the shared keys. */
public interface KVClient {
    CompletableFuture<KeyValue.Value> putKVIfAbsent(KeyValue keyValue);

    CompletableFuture<KeyValue.Value> putKV(KeyValue keyValue);

    CompletableFuture<KeyValue.Value> getKV(KeyValue.Key key);

    CompletableFuture<KeyValue.Value> delKV(KeyValue.Key key);
}
