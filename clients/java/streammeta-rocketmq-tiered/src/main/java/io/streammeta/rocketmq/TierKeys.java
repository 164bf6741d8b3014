package io.streammeta.rocketmq;

import io.streammeta.client.KeyValue;
import io.streammeta.client.KeyValues;
import io.streammeta.client.MetadataChange;
import io.streammeta.client.ObjectOwner;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.Watch;
import io.streammeta.client.WatchListener;
import io.streammeta.client.WatchSelection;
import io.streammeta.client.errors.ClientClosedException;
import io.streammeta.client.errors.KeyConflictException;
import io.streammeta.client.errors.StreammetaException;
import java.nio.charset.StandardCharsets;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentSkipListMap;
import java.util.concurrent.TimeUnit;
import java.util.function.Consumer;
import java.util.function.UnaryOperator;
import org.apache.rocketmq.logging.org.slf4j.Logger;
import org.apache.rocketmq.logging.org.slf4j.LoggerFactory;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.tieredstore.util.MessageStoreUtil;

/**
 * Keys of one tier, all in memory and kept current by a watch. Values are JSON, with the epoch of the process that wrote
 * them. Reads are local. Writes compare and set, and never replace a value of a newer process.
 */
final class TierKeys implements AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(MessageStoreUtil.TIERED_STORE_LOGGER_NAME);
    private static final String NAMESPACE = "rocketmq-tiered";
    private static final String WRITER = "writerEpoch";
    private static final long REPEAT_MS = 1_000;

    /** A value, null if this process deleted it and the watch has not reported that yet. */
    private record Entry(byte[] value, long version) {
        boolean isDeleted() {
            return value == null;
        }
    }

    private final StreammetaClient client;
    private final KeyValues keys;
    private final String prefix;
    private final long epoch;
    private final ConcurrentSkipListMap<String, Entry> entries = new ConcurrentSkipListMap<>();
    private volatile Watch watch;

    private TierKeys(StreammetaClient client, String prefix, long epoch) {
        this.client = client;
        this.keys = client.keyValues(NAMESPACE);
        this.prefix = prefix;
        this.epoch = epoch;
    }

    /** Loads the keys with a prefix, for the process with an epoch. */
    static TierKeys open(StreammetaClient client, String prefix, long epoch) {
        TierKeys keys = new TierKeys(client, prefix, epoch);
        StreammetaClient.await(keys.load());
        return keys;
    }

    /** Returns a key as the owner of objects. */
    ObjectOwner.Key owner(String key) {
        return new ObjectOwner.Key(NAMESPACE, prefix + key);
    }

    /** Returns a new copy of a value, empty without one. */
    <T> Optional<T> get(String key, Class<T> type) {
        return Optional.ofNullable(live(key)).map(entry -> RemotingSerializable.decode(entry.value(), type));
    }

    /** Passes on a new copy of each value whose key begins with a prefix, in key order. */
    <T> void forEach(String start, Class<T> type, Consumer<? super T> action) {
        for (String key : under(start)) {
            get(key, type).ifPresent(action);
        }
    }

    /** Returns the keys that begin with a prefix, in order. */
    List<String> under(String start) {
        return entries.tailMap(start, true).entrySet().stream()
                .takeWhile(entry -> entry.getKey().startsWith(start))
                .filter(entry -> !entry.getValue().isDeleted())
                .map(Map.Entry::getKey)
                .toList();
    }

    /** Puts a value. */
    void put(String key, Object value) {
        byte[] bytes = encode(value);
        Entry seen = live(key);
        while (!write(key, bytes, seen)) {
            seen = refresh(key);
        }
    }

    /** Puts what a function makes of the present value, null without one, and returns it. */
    <T> T update(String key, Class<T> type, UnaryOperator<T> change) {
        Entry seen = live(key);
        while (true) {
            T changed = change.apply(seen == null ? null : RemotingSerializable.decode(seen.value(), type));
            if (write(key, encode(changed), seen)) {
                return changed;
            }
            seen = refresh(key);
        }
    }

    /** Puts a value if the key has one. Returns whether it had. */
    boolean replace(String key, Object value) {
        byte[] bytes = encode(value);
        Entry seen = live(key);
        while (seen != null && !write(key, bytes, seen)) {
            seen = refresh(key);
        }
        return seen != null;
    }

    /** Puts a value if the key has none, and returns the value that it has now. */
    <T> T putIfAbsent(String key, T value, Class<T> type) {
        byte[] bytes = encode(value);
        Entry seen = live(key);
        while (seen == null) {
            if (write(key, bytes, null)) {
                return value;
            }
            seen = refresh(key);
        }
        return RemotingSerializable.decode(seen.value(), type);
    }

    /** Deletes a key if there is one, and with it the objects that it owns. */
    void delete(String key) {
        Entry seen = live(key);
        if (seen == null) { // perhaps only here
            seen = refresh(key);
        }
        while (seen != null) {
            requireNotNewer(key, seen);
            Map<String, Long> version = Map.of(prefix + key, seen.version());
            if (StreammetaClient.await(keys.deleteAllIfVersion(version)).isEmpty()) {
                // The watch may still have to report the value itself, and must not restore it.
                merge(key, new Entry(null, seen.version()));
                return;
            }
            seen = refresh(key);
        }
    }

    @Override
    public void close() {
        watch.close();
    }

    private boolean write(String key, byte[] value, Entry seen) {
        if (seen != null) {
            requireNotNewer(key, seen);
        }
        try {
            long version = seen == null ? 0 : seen.version();
            long written = StreammetaClient.await(keys.putIfVersion(prefix + key, value, version));
            merge(key, new Entry(value, written));
            return true;
        } catch (KeyConflictException conflict) {
            return false;
        }
    }

    private void requireNotNewer(String key, Entry entry) {
        Object writer = fields(entry.value()).get(WRITER);
        if (writer instanceof Number number && number.longValue() > epoch) {
            throw new IllegalStateException("key '" + prefix + key + "' was written by a newer process of this broker, of "
                    + "epoch " + writer + ", and this one has epoch " + epoch + ". Stop this process");
        }
    }

    private byte[] encode(Object value) {
        Map<String, Object> fields = fields(RemotingSerializable.encode(value));
        fields.put(WRITER, epoch);
        return RemotingSerializable.encode(fields);
    }

    @SuppressWarnings("unchecked")
    private static Map<String, Object> fields(byte[] value) {
        return RemotingSerializable.decode(value, TreeMap.class);
    }

    private Entry live(String key) {
        Entry entry = entries.get(key);
        return entry == null || entry.isDeleted() ? null : entry;
    }

    /** Reads a key from the controllers. */
    private Entry refresh(String key) {
        Entry old = entries.get(key);
        Optional<KeyValue> found = StreammetaClient.await(keys.get(prefix + key));
        if (found.isEmpty()) {
            if (old != null) {
                entries.remove(key, old);
            }
            return null;
        }
        merge(key, new Entry(found.get().value(), found.get().version()));
        return live(key);
    }

    /** A version is the end of the log entry that wrote it, so the larger one is newer. */
    private void merge(String key, Entry entry) {
        entries.merge(key, entry, (old, other) -> {
            boolean isNewer = other.version() > old.version() || other.version() == old.version() && other.isDeleted();
            return isNewer ? other : old;
        });
    }

    private CompletableFuture<Void> load() {
        WatchListener listener = new WatchListener() {
            @Override
            public void onChanges(List<MetadataChange> changes) {
                changes.forEach(TierKeys.this::apply);
            }

            @Override
            public void onEnd(StreammetaException error) {
                reload(error);
            }
        };
        return client.watch(WatchSelection.ofKeys(NAMESPACE, prefix), listener).thenCompose(begun -> {
            watch = begun;
            // An entry that is still the same after the listing, and not in it, is deleted.
            Map<String, Entry> before = Map.copyOf(entries);
            Set<String> listed = new HashSet<>();
            return keys.list(prefix)
                    .forEach(found -> {
                        String key = found.key().substring(prefix.length());
                        listed.add(key);
                        merge(key, new Entry(found.value(), found.version()));
                    })
                    .thenRun(() -> before.forEach((key, entry) -> {
                        if (!listed.contains(key)) {
                            entries.remove(key, entry);
                        }
                    }));
        });
    }

    private void reload(Throwable error) {
        if (error instanceof ClientClosedException) {
            return;
        }
        LOG.warn("The watch of '{}' ended, watching again in {} ms: {}", prefix, REPEAT_MS, error.toString());
        CompletableFuture.delayedExecutor(REPEAT_MS, TimeUnit.MILLISECONDS).execute(() -> load().exceptionally(failure -> {
            watch.close();
            reload(StreammetaClient.cause(failure));
            return null;
        }));
    }

    private void apply(MetadataChange change) {
        if (change instanceof MetadataChange.Key ofKey) {
            String key = ofKey.key().substring(prefix.length());
            if (ofKey.value().isPresent()) {
                KeyValue value = ofKey.value().get();
                merge(key, new Entry(value.value(), value.version()));
            } else {
                entries.computeIfPresent(key, (same, entry) -> entry.version() <= ofKey.offset() ? null : entry);
            }
        }
    }
}
