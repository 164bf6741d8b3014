package io.streammeta.automq;

import com.automq.stream.api.KVClient;
import com.automq.stream.api.KeyValue;
import com.automq.stream.api.KeyValue.Key;
import com.automq.stream.api.KeyValue.Value;
import io.streammeta.client.KeyValues;
import io.streammeta.client.ValueToPut;
import io.streammeta.client.errors.KeyConflictException;
import io.streammeta.client.StreammetaClient;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;

/** Keys of AutoMQ in one namespace of streammeta. {@link AutomqMetadata} makes it. */
final class StreammetaKvClient implements KVClient {
    private static final OptionalLong ABSENT = OptionalLong.of(0);
    private static final OptionalLong ANY = OptionalLong.empty();

    private final KeyValues keys;
    private final String namespace;
    private final Calls calls;

    StreammetaKvClient(KeyValues keys, String namespace, Calls calls) {
        this.keys = keys;
        this.namespace = namespace;
        this.calls = calls;
    }

    /** Puts a value unless the key has one, and returns the value that the key has then. */
    @Override
    public CompletableFuture<Value> putKVIfAbsent(KeyValue keyValue) {
        return put(keyValue, ABSENT);
    }

    @Override
    public CompletableFuture<Value> putKV(KeyValue keyValue) {
        return put(keyValue, ANY);
    }

    private CompletableFuture<Value> put(KeyValue keyValue, OptionalLong expectedVersion) {
        ValueToPut value = new ValueToPut(
                namespace, keyValue.key().get(), bytes(keyValue.value().get()), expectedVersion);
        return calls.call(() -> keys.putAll(List.of(value)))
                .thenApply(results -> Value.of(ByteBuffer.wrap(results.get(0).value())));
    }

    /** Returns the value of a key, {@link Value#isNull} for an absent one. */
    @Override
    public CompletableFuture<Value> getKV(Key key) {
        return calls.call(() -> keys.get(key.get()))
                .thenApply(found -> value(found.map(io.streammeta.client.KeyValue::value).orElse(null)));
    }

    /** Deletes a key, and returns the value that it had. */
    @Override
    public CompletableFuture<Value> delKV(Key key) {
        return calls.call(() -> deleteFound(key.get()));
    }

    private CompletableFuture<Value> deleteFound(String key) {
        return keys.get(key).thenCompose(found -> {
            if (found.isEmpty()) {
                return CompletableFuture.completedFuture(value(null));
            }
            return keys.deleteIfVersion(key, found.get().version())
                    .thenApply(none -> value(found.get().value()))
                    .exceptionallyCompose(error -> StreammetaClient.cause(error) instanceof KeyConflictException
                            ? deleteFound(key) // another value was put meanwhile
                            : CompletableFuture.failedFuture(error));
        });
    }

    private static Value value(byte[] bytes) {
        return Value.of(bytes == null ? null : ByteBuffer.wrap(bytes));
    }

    private static byte[] bytes(ByteBuffer value) {
        byte[] bytes = new byte[value.remaining()];
        value.duplicate().get(bytes);
        return bytes;
    }
}
