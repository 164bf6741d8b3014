package io.streammeta.client;

import io.streammeta.client.errors.Rejection;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.client.errors.UnsupportedException;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.WatchStream;
import io.streammeta.v1.WatchResponse;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * A watch of the metadata: committed changes in order and without a gap. It continues at another controller after a
 * failure. {@link StreammetaClient#watch} begins it.
 */
public final class Watch implements AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(Watch.class);

    private final WatchSelection selection;
    private final WatchListener listener;
    private final WatchStream stream;

    private Watch(Calls calls, WatchSelection selection, WatchListener listener) {
        this.selection = selection;
        this.listener = listener;
        this.stream = new WatchStream(
                calls, selection.toWire(), selection.fromOffset(), this::onResponse, this::onEnd);
    }

    static CompletableFuture<Watch> begin(Calls calls, WatchSelection selection, WatchListener listener) {
        Watch watch = new Watch(calls, selection, listener);
        return watch.stream.start().thenApply(none -> watch);
    }

    /** Returns the offset from which another watch would miss no change. */
    public long position() {
        return stream.position();
    }

    /** Ends the watch. The changes that are being processed are the last ones. */
    @Override
    public void close() {
        stream.close();
    }

    private void onResponse(WatchResponse response) {
        if (!response.getRecords().isEmpty()) {
            stream.end(new UnsupportedException(new Rejection(
                    "a watch of changes", null, "", "the controller sends records of its log", Map.of())));
            return;
        }
        List<MetadataChange> changes = WatchedChanges.of(response.getChangesList(), selection.kinds());
        if (!changes.isEmpty()) {
            tell(() -> listener.onChanges(changes));
        }
    }

    private void onEnd(StreammetaException error) {
        tell(() -> listener.onEnd(error));
    }

    private void tell(Runnable callback) {
        try {
            callback.run();
        } catch (RuntimeException error) {
            // The changes after it are wanted nevertheless.
            LOG.error("a watch listener failed before offset {}", position(), error);
        }
    }
}
