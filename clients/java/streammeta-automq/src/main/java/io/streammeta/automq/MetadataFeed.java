package io.streammeta.automq;

import io.streammeta.client.EntityKind;
import io.streammeta.client.MetadataChange;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.Watch;
import io.streammeta.client.WatchListener;
import io.streammeta.client.WatchSelection;
import io.streammeta.client.errors.StreammetaException;
import java.time.Duration;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Watch of all streams and objects, which begins again when it ends. It feeds what needs no call then. */
final class MetadataFeed implements WatchListener, AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(MetadataFeed.class);
    private static final Duration DELAY_AFTER_ERROR = Duration.ofSeconds(1);

    private final StreammetaClient client;
    private final DestroyedObjects destroyed = new DestroyedObjects();
    private final StreamListeners listeners;
    private Watch watch;
    private boolean isClosed;

    private MetadataFeed(StreammetaClient client) {
        this.client = client;
        this.listeners = new StreamListeners(client.streams());
    }

    /** Begins the watch: what is read afterwards has all changes that it does not report. */
    static CompletableFuture<MetadataFeed> begin(StreammetaClient client) {
        MetadataFeed feed = new MetadataFeed(client);
        return feed.watch().thenApply(none -> feed);
    }

    DestroyedObjects destroyed() {
        return destroyed;
    }

    StreamListeners listeners() {
        return listeners;
    }

    private CompletableFuture<Void> watch() {
        return client.watch(WatchSelection.of(EntityKind.STREAM, EntityKind.OBJECT), this)
                .thenAccept(this::keep);
    }

    private synchronized void keep(Watch begun) {
        watch = begun;
        if (isClosed) {
            begun.close();
        }
    }

    @Override
    public void onChanges(List<MetadataChange> changes) {
        for (MetadataChange change : changes) {
            if (change instanceof MetadataChange.Stream stream) {
                listeners.onChange(stream.streamId());
            } else if (change instanceof MetadataChange.Object object) {
                switch (object.event()) {
                    case LINKED, DESTROYED -> destroyed.add(object.objectId());
                    default -> {
                        // The object is not readable yet, or was destroyed before.
                    }
                }
            }
        }
    }

    @Override
    public synchronized void onEnd(StreammetaException error) {
        if (!isClosed) {
            LOG.warn("the watch of the metadata ended, it begins again in 1 s: {}", error.getMessage());
            Calls.after(DELAY_AFTER_ERROR).execute(this::watchAgain);
        }
    }

    private void watchAgain() {
        synchronized (this) {
            if (isClosed) {
                return;
            }
        }
        watch().whenComplete((none, failure) -> {
            if (failure == null) {
                listeners.refreshAll();
            } else if (StreammetaClient.cause(failure) instanceof StreammetaException error) {
                onEnd(error);
            }
        });
    }

    @Override
    public synchronized void close() {
        isClosed = true;
        watch.close();
    }
}
