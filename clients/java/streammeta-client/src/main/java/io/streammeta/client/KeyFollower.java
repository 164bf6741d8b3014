package io.streammeta.client;

import io.streammeta.client.errors.StreammetaException;
import io.streammeta.client.transport.Calls;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Follows the keys with a prefix: first those that there are, then every change. A cache that applies each call of its
 * listener has the keys of the metadata, a moment later. {@link StreammetaClient#followKeys} begins it.
 *
 * <p>It survives failures: if changes are lost, it lists the keys again, and reports the differences.
 */
public final class KeyFollower implements AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(KeyFollower.class);
    private static final long RETRY_MS = 1_000;

    private final Calls calls;
    private final KeyValues keys;
    private final String prefix;
    private final WatchSelection selection;
    private final KeyListener listener;
    private final CompletableFuture<Void> listed = new CompletableFuture<>();

    /** Versions of the reported keys. */
    private final Map<String, Long> versions = new HashMap<>();

    private Round round;
    private boolean isClosed;

    private KeyFollower(Calls calls, String namespace, String prefix, KeyListener listener) {
        this.calls = calls;
        this.keys = new KeyValues(calls, namespace);
        this.prefix = prefix;
        this.selection = WatchSelection.ofKeys(namespace, prefix);
        this.listener = listener;
    }

    static KeyFollower begin(Calls calls, String namespace, String prefix, KeyListener listener) {
        KeyFollower follower = new KeyFollower(calls, namespace, prefix, listener);
        follower.beginRound();
        return follower;
    }

    /** Returns a future that completes when all keys that there were have been reported. */
    public CompletableFuture<Void> listed() {
        return listed;
    }

    /**
     * Returns a future that completes when the keys that there were with a longer prefix have been reported. They are
     * listed before the others.
     */
    public synchronized CompletableFuture<Void> listed(String longerPrefix) {
        return listed.isDone() ? listed : round.listFirst(longerPrefix);
    }

    /** Reports nothing more, when the present callback has ended. */
    @Override
    public synchronized void close() {
        isClosed = true;
        round.close();
    }

    private void beginRound() {
        Round next = new Round();
        synchronized (this) {
            if (isClosed) {
                return;
            }
            round = next;
        }
        next.begin();
    }

    private void put(KeyValue value) {
        if (value.version() > versions.getOrDefault(value.key(), 0L)) {
            versions.put(value.key(), value.version());
            tell(() -> listener.onPut(value));
        }
    }

    private void delete(String key) {
        if (versions.remove(key) != null) {
            tell(() -> listener.onDeleted(key));
        }
    }

    private void tell(Runnable callback) {
        try {
            callback.run();
        } catch (RuntimeException error) {
            // The changes after it are wanted nevertheless.
            LOG.error("a listener of the keys '{}' failed", prefix, error);
        }
    }

    /** One watch, and the listing at its beginning. Whatever arrives after its failure is ignored. */
    private final class Round implements WatchListener {
        private final Set<String> found = new HashSet<>();
        /** Keys that were put during the listing. They may be missing in its pages. */
        private final Set<String> put = new HashSet<>();
        /** Offsets of deletions during the listing, whose pages may have been read before. */
        private final Map<String, Long> deleted = new HashMap<>();

        private final CompletableFuture<Void> begun = new CompletableFuture<>();
        private final Map<String, CompletableFuture<Void>> listedFirst = new HashMap<>();

        private Watch watch; // null before it has begun
        private boolean isListing = true;

        /** Watches from now on, then lists: so no change is missed. */
        void begin() {
            Watch.begin(calls, selection, this)
                    .thenCompose(present -> {
                        adopt(present);
                        begun.complete(null);
                        return keys.list(prefix).forEach(this::onListed);
                    })
                    .whenComplete((none, error) -> {
                        if (error == null) {
                            endListing();
                        } else {
                            fail(StreammetaClient.cause(error));
                        }
                    });
        }

        CompletableFuture<Void> listFirst(String longerPrefix) {
            return listedFirst.computeIfAbsent(longerPrefix, added -> begun.thenCompose(
                            none -> keys.list(longerPrefix).forEach(this::onListed))
                    // After a failure another round lists all keys.
                    .handle((none, error) -> error == null && !hasFailed() ? begun : listed)
                    .thenCompose(Function.identity()));
        }

        private boolean hasFailed() {
            synchronized (KeyFollower.this) {
                return isOver();
            }
        }

        void close() {
            if (watch != null) {
                watch.close();
            }
        }

        private boolean isOver() {
            return isClosed || this != round;
        }

        private void adopt(Watch present) {
            synchronized (KeyFollower.this) {
                watch = present;
                if (isOver()) {
                    close();
                }
            }
        }

        private void onListed(KeyValue value) {
            synchronized (KeyFollower.this) {
                found.add(value.key());
                // The version of a value is the offset of its log entry, plus 1.
                if (!isOver() && isListing && value.version() > deleted.getOrDefault(value.key(), -1L)) {
                    put(value);
                }
            }
        }

        private void endListing() {
            synchronized (KeyFollower.this) {
                if (isOver()) {
                    return;
                }
                isListing = false;
                found.addAll(put);
                // Keys of an earlier round that were deleted while no watch observed it.
                List<String> gone = versions.keySet().stream()
                        .filter(key -> !found.contains(key))
                        .toList();
                gone.forEach(KeyFollower.this::delete);
                found.clear();
                put.clear();
                deleted.clear();
                listedFirst.clear();
            }
            listed.complete(null);
        }

        @Override
        public void onChanges(List<MetadataChange> changes) {
            synchronized (KeyFollower.this) {
                for (MetadataChange change : changes) {
                    if (!isOver() && change instanceof MetadataChange.Key key) {
                        apply(key);
                    }
                }
            }
        }

        private void apply(MetadataChange.Key change) {
            if (change.value().isPresent()) {
                if (isListing) {
                    put.add(change.key());
                }
                KeyFollower.this.put(change.value().get());
                return;
            }
            if (isListing) {
                put.remove(change.key());
                deleted.put(change.key(), change.offset());
            }
            // A page that was read after the deletion may have had a newer value already.
            if (versions.getOrDefault(change.key(), 0L) <= change.offset()) {
                delete(change.key());
            }
        }

        @Override
        public void onEnd(StreammetaException error) {
            fail(error);
        }

        private void fail(Throwable error) {
            synchronized (KeyFollower.this) {
                if (isOver()) {
                    return;
                }
                round = new Round(); // both the watch and the listing may fail, and only the first counts
                close();
            }
            begun.completeExceptionally(error);
            LOG.warn("the keys '{}' are listed again in {} ms: {}", prefix, RETRY_MS, error.getMessage());
            try {
                calls.timer().schedule(KeyFollower.this::beginRound, RETRY_MS, TimeUnit.MILLISECONDS);
            } catch (RejectedExecutionException closed) {
                listed.completeExceptionally(error);
            }
        }
    }
}
