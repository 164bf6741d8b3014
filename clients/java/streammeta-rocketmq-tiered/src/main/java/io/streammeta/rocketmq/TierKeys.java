package io.streammeta.rocketmq;

import io.streammeta.client.KeyFollower;
import io.streammeta.client.KeyListener;
import io.streammeta.client.KeyValue;
import io.streammeta.client.KeyValues;
import io.streammeta.client.ObjectOwner;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.ControllerUnavailableException;
import io.streammeta.client.errors.KeyConflictException;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentSkipListMap;
import java.util.function.Consumer;
import java.util.function.UnaryOperator;
import org.apache.rocketmq.logging.org.slf4j.Logger;
import org.apache.rocketmq.logging.org.slf4j.LoggerFactory;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.tieredstore.util.MessageStoreUtil;

/**
 * Keys of one tier, all in memory and kept current by a follower. Values are JSON, with the epoch of the process that wrote
 * them. Reads are local. Writes compare and set, and never replace a value of a newer process.
 */
final class TierKeys implements KeyListener, AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(MessageStoreUtil.TIERED_STORE_LOGGER_NAME);
    private static final String NAMESPACE = "rocketmq-tiered";
    private static final String WRITER = "writerEpoch";

    /**
     * A value.
     *
     * @param value null if it is deleted, and that is not reported yet
     * @param version the version, or the one that was deleted
     * @param followed the last version that was reported
     */
    private record Entry(byte[] value, long version, long followed) {
        boolean isDeleted() {
            return value == null;
        }
    }

    private final KeyValues keys;
    private final String prefix;
    private final long epoch;
    private final ConcurrentSkipListMap<String, Entry> entries = new ConcurrentSkipListMap<>();
    private KeyFollower follower;

    private TierKeys(StreammetaClient client, String prefix, long epoch) {
        this.keys = client.keyValues(NAMESPACE);
        this.prefix = prefix;
        this.epoch = epoch;
    }

    /** Loads the keys with a prefix, for the process with an epoch. */
    static TierKeys open(StreammetaClient client, String prefix, long epoch) {
        TierKeys keys = new TierKeys(client, prefix, epoch);
        keys.follower = client.followKeys(NAMESPACE, prefix, keys);
        StreammetaClient.await(keys.follower.listed());
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

    /**
     * Puts a value. Waits as long as the controllers don't answer: RocketMQ would lose track of messages that are
     * committed, but whose segment could not be updated.
     */
    void put(String key, Object value) {
        byte[] bytes = encode(value);
        Entry seen = live(key);
        while (true) {
            try {
                if (write(key, bytes, seen)) {
                    return;
                }
                seen = refresh(key);
            } catch (ControllerUnavailableException error) {
                LOG.warn("Key '{}' is not stored yet, trying again", prefix + key, error);
            }
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
                // The value itself may still be reported, and must not come back.
                adopt(key, null, seen.version(), 0);
                return;
            }
            seen = refresh(key);
        }
    }

    @Override
    public void close() {
        follower.close();
    }

    private boolean write(String key, byte[] value, Entry seen) {
        if (seen != null) {
            requireNotNewer(key, seen);
        }
        try {
            long version = seen == null ? 0 : seen.version();
            long written = StreammetaClient.await(keys.putIfVersion(prefix + key, value, version));
            adopt(key, value, written, 0);
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
                adopt(key, null, old.version(), 0);
            }
            return null;
        }
        adopt(key, found.get().value(), found.get().version(), 0);
        return live(key);
    }

    /** Adopts a value, null for a deletion, unless a newer one is known. Versions grow over all keys. */
    private void adopt(String key, byte[] value, long version, long followed) {
        entries.compute(key, (same, old) -> {
            long reported = Math.max(followed, old == null ? 0 : old.followed());
            boolean isNewer = old == null || version > old.version() || version == old.version() && value == null;
            return isNewer ? new Entry(value, version, reported) : new Entry(old.value(), old.version(), reported);
        });
    }

    @Override
    public void onPut(KeyValue value) {
        adopt(value.key().substring(prefix.length()), value.value(), value.version(), value.version());
    }

    @Override
    public void onDeleted(String key) {
        // A value that this process has put since is reported next.
        entries.computeIfPresent(
                key.substring(prefix.length()), (same, entry) -> entry.version() <= entry.followed() ? null : entry);
    }
}
