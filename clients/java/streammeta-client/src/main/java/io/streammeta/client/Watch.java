package io.streammeta.client;

import com.google.protobuf.InvalidProtocolBufferException;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.client.transport.WatchStream;
import io.streammeta.v1.DescribeClusterRequest;
import io.streammeta.v1.RecordSet;
import io.streammeta.v1.WatchResponse;
import java.util.List;
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

    private Watch(Calls calls, WatchSelection selection, WatchListener listener, long fromOffset) {
        this.selection = selection;
        this.listener = listener;
        this.stream = new WatchStream(calls, selection.toWire(), fromOffset, this::translate, this::end);
    }

    static CompletableFuture<Watch> begin(Calls calls, WatchSelection selection, WatchListener listener) {
        CompletableFuture<Long> from = selection.fromOffset().isPresent()
                ? CompletableFuture.completedFuture(selection.fromOffset().getAsLong())
                : calls.call(Methods.DESCRIBE_CLUSTER, DescribeClusterRequest.getDefaultInstance())
                        .thenApply(answer -> answer.getHighWatermark());
        return from.thenApply(offset -> {
            Watch watch = new Watch(calls, selection, listener, offset);
            watch.stream.start();
            return watch;
        });
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

    private void translate(WatchResponse response) {
        List<MetadataChange> changes;
        try {
            RecordSet records = RecordSet.parseFrom(response.getRecords());
            changes = LogRecords.changes(response.getOffset(), records.getRecordsList(), selection.kinds());
        } catch (InvalidProtocolBufferException error) {
            throw new IllegalStateException("the change at offset " + response.getOffset() + " does not parse", error);
        }
        if (!changes.isEmpty()) {
            tell(() -> listener.onChanges(changes));
        }
    }

    private void end(StreammetaException error) {
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
