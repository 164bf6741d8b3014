package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.DeleteKVsRequest;
import io.streammeta.v1.GetKVsRequest;
import io.streammeta.v1.KVKey;
import io.streammeta.v1.KVResult;
import io.streammeta.v1.ListKVsRequest;
import io.streammeta.v1.PutKVsRequest;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.Set;
import java.util.concurrent.CompletableFuture;

/**
 * The keys of one namespace: small values that brokers share.
 *
 * <p>A key has at most 1024 bytes, a value at most 1 MiB. Reads are linearizable. Several keys of one call are put or
 * deleted each on its own condition, not together.
 */
public final class KeyValues {
    private static final int KEYS_PER_CALL = 5_000;
    /** Less than the contract's limit of 3.75 MiB, because keys count too. */
    private static final int BYTES_PER_CALL = 3 << 20;

    private final Calls calls;
    private final String namespace;

    KeyValues(Calls calls, String namespace) {
        this.calls = calls;
        this.namespace = namespace;
    }

    /** Returns the value of a key, empty if the key is absent. */
    public CompletableFuture<Optional<KeyValue>> get(String key) {
        return getAll(List.of(key)).thenApply(found -> Optional.ofNullable(found.get(key)));
    }

    /** Returns the values of keys, by key. Absent keys are left out. */
    public CompletableFuture<Map<String, KeyValue>> getAll(Collection<String> keys) {
        return getRest(new ArrayList<>(new LinkedHashSet<>(keys)), new HashMap<>());
    }

    private CompletableFuture<Map<String, KeyValue>> getRest(List<String> keys, Map<String, KeyValue> found) {
        if (keys.isEmpty()) {
            return CompletableFuture.completedFuture(found);
        }
        GetKVsRequest.Builder request = GetKVsRequest.newBuilder().setMayStop(true);
        keys.stream().limit(KEYS_PER_CALL).forEach(key -> request.addKeys(named(key, OptionalLong.empty())));
        return calls.call(Methods.GET_KVS, request.build()).thenCompose(answer -> {
            // A large answer may end early. At least one key is answered.
            int answered = Math.max(1, answer.getResultsCount());
            for (int row = 0; row < answer.getResultsCount(); row++) {
                KVResult result = answer.getResults(row);
                if (result.getFound()) {
                    String key = keys.get(row);
                    found.put(key, new KeyValue(key, result.getValue().toByteArray(), result.getVersion()));
                }
            }
            return getRest(keys.subList(answered, keys.size()), found);
        });
    }

    /** Puts a value, and returns its version. */
    public CompletableFuture<Long> put(String key, byte[] value) {
        return put(key, value, OptionalLong.empty());
    }

    /**
     * Puts a value if the key is absent, and returns its version. Fails with
     * {@link io.streammeta.client.errors.KeyConflictException} if the key has another value.
     */
    public CompletableFuture<Long> putIfAbsent(String key, byte[] value) {
        return putIfVersion(key, value, 0);
    }

    /**
     * Puts a value if the key is at a version, and returns the new version. Fails with
     * {@link io.streammeta.client.errors.KeyConflictException} for another version, unless the value there is equal: it
     * may be from an earlier attempt of this call.
     *
     * @param expectedVersion the version, 0 for an absent key
     */
    public CompletableFuture<Long> putIfVersion(String key, byte[] value, long expectedVersion) {
        return put(key, value, OptionalLong.of(expectedVersion));
    }

    private CompletableFuture<Long> put(String key, byte[] value, OptionalLong expectedVersion) {
        return putAll(List.of(new ValueToPut(namespace, key, value, expectedVersion))).thenApply(results -> {
            PutResult result = results.get(0);
            boolean isRepeat = result.version() > 0 && Arrays.equals(result.value(), value);
            if (result.error() == ErrorCode.KEY_EXIST && !isRepeat) {
                throw result.error().rejection(subject(key));
            }
            return result.version();
        });
    }

    /**
     * Puts values, and returns their outcomes in the same order, each a version or a conflict. The values may be of any
     * namespace. If it fails, some of them may be stored.
     */
    public CompletableFuture<List<PutResult>> putAll(List<ValueToPut> values) {
        return putRest(values, new ArrayList<>());
    }

    private CompletableFuture<List<PutResult>> putRest(List<ValueToPut> values, List<PutResult> results) {
        if (values.isEmpty()) {
            return CompletableFuture.completedFuture(results);
        }
        int count = 0;
        long bytes = 0;
        PutKVsRequest.Builder request = PutKVsRequest.newBuilder();
        // A value above the limit is sent alone, and the controller rejects it.
        while (count < Math.min(values.size(), KEYS_PER_CALL)
                && (count == 0 || bytes + values.get(count).value().length <= BYTES_PER_CALL)) {
            bytes += values.get(count).value().length;
            request.addItems(values.get(count).toWire());
            count++;
        }

        List<ValueToPut> batch = values.subList(0, count);
        return calls.call(Methods.PUT_KVS, request.build()).thenCompose(answer -> {
            Wire.checkRows("PutKVs", batch.size(), answer.getResultsCount());
            for (int row = 0; row < batch.size(); row++) {
                PutResult result = PutResult.of(answer.getResults(row));
                if (!result.error().isSuccess() && result.error() != ErrorCode.KEY_EXIST) {
                    throw result.error().rejection(subject(batch.get(row).key()));
                }
                results.add(result);
            }
            return putRest(values.subList(batch.size(), values.size()), results);
        });
    }

    /** Deletes a key, if there is one. */
    public CompletableFuture<Void> delete(String key) {
        return deleteAll(List.of(key));
    }

    /** Deletes keys. Absent ones are ignored. */
    public CompletableFuture<Void> deleteAll(Collection<String> keys) {
        Map<String, OptionalLong> versions = new LinkedHashMap<>();
        keys.forEach(key -> versions.put(key, OptionalLong.empty()));
        return deleteRest(new ArrayList<>(versions.entrySet()), new HashSet<>()).thenApply(staying -> null);
    }

    /**
     * Deletes a key if it is at a version, or absent. Fails with
     * {@link io.streammeta.client.errors.KeyConflictException} for another version.
     */
    public CompletableFuture<Void> deleteIfVersion(String key, long expectedVersion) {
        return deleteAllIfVersion(Map.of(key, expectedVersion)).thenApply(staying -> {
            if (!staying.isEmpty()) {
                throw ErrorCode.KEY_EXIST.rejection(subject(key));
            }
            return null;
        });
    }

    /** Deletes keys that are at their versions. Returns the keys that stay, because they have another version. */
    public CompletableFuture<Set<String>> deleteAllIfVersion(Map<String, Long> expectedVersions) {
        Map<String, OptionalLong> versions = new LinkedHashMap<>();
        expectedVersions.forEach((key, version) -> versions.put(key, OptionalLong.of(version)));
        return deleteRest(new ArrayList<>(versions.entrySet()), new HashSet<>());
    }

    private CompletableFuture<Set<String>> deleteRest(
            List<Map.Entry<String, OptionalLong>> keys, Set<String> staying) {
        if (keys.isEmpty()) {
            return CompletableFuture.completedFuture(staying);
        }
        var batch = keys.subList(0, Math.min(keys.size(), KEYS_PER_CALL));
        DeleteKVsRequest.Builder request = DeleteKVsRequest.newBuilder();
        batch.forEach(key -> request.addKeys(named(key.getKey(), key.getValue())));
        return calls.call(Methods.DELETE_KVS, request.build()).thenCompose(answer -> {
            Wire.checkRows("DeleteKVs", batch.size(), answer.getResultsCount());
            for (int row = 0; row < batch.size(); row++) {
                String key = batch.get(row).getKey();
                ErrorCode error = Wire.code(answer.getResults(row).getError());
                if (error == ErrorCode.KEY_EXIST) {
                    staying.add(key);
                } else if (!error.isSuccess() && error != ErrorCode.KEY_NOT_EXIST) {
                    throw error.rejection(subject(key));
                }
            }
            return deleteRest(keys.subList(batch.size(), keys.size()), staying);
        });
    }

    /** Lists the keys with a prefix, and their values, in key order. The prefix may be empty. */
    public Pages<KeyValue> list(String prefix) {
        return list(prefix, false);
    }

    /** Lists the keys with a prefix, without values. */
    public Pages<KeyValue> listKeys(String prefix) {
        return list(prefix, true);
    }

    private Pages<KeyValue> list(String prefix, boolean keysOnly) {
        return new Pages<>(token -> calls.call(
                        Methods.LIST_KVS,
                        ListKVsRequest.newBuilder()
                                .setNamespace(namespace)
                                .setPrefix(prefix)
                                .setKeysOnly(keysOnly)
                                .setPage(Wire.page(token))
                                .build())
                .thenApply(answer -> new Page<>(
                        answer.getEntriesList().stream()
                                .map(entry -> new KeyValue(
                                        entry.getKey(), entry.getValue().toByteArray(), entry.getVersion()))
                                .toList(),
                        answer.getNextPageToken())));
    }

    private KVKey named(String key, OptionalLong expectedVersion) {
        KVKey.Builder named = KVKey.newBuilder().setNamespace(namespace).setKey(key);
        expectedVersion.ifPresent(named::setExpectedVersion);
        return named.build();
    }

    private String subject(String key) {
        return "key '" + (namespace.isEmpty() ? key : namespace + "/" + key) + "'";
    }
}
