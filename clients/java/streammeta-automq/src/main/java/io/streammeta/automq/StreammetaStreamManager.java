package io.streammeta.automq;

import com.automq.stream.s3.metadata.StreamMetadata;
import com.automq.stream.s3.metadata.StreamState;
import com.automq.stream.s3.streams.StreamManager;
import com.automq.stream.s3.streams.StreamMetadataListener;
import io.streammeta.client.NodeStreams;
import io.streammeta.client.OpenedStream;
import io.streammeta.client.OpeningStream;
import io.streammeta.client.StreamDescription;
import io.streammeta.client.StreamToClose;
import io.streammeta.client.StreamToOpen;
import io.streammeta.client.StreamToTrim;
import io.streammeta.client.Streams;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;

/** Streams of one node in the metadata of streammeta. {@link AutomqMetadata} makes it. */
final class StreammetaStreamManager implements StreamManager {
    /** The epoch of a stream that was never opened. */
    private static final long NO_EPOCH = -1;

    private final NodeStreams own;
    private final Streams all;
    private final StreamListeners listeners;
    private final Calls calls;

    StreammetaStreamManager(NodeStreams own, Streams all, StreamListeners listeners, Calls calls) {
        this.own = own;
        this.all = all;
        this.listeners = listeners;
        this.calls = calls;
    }

    @Override
    public boolean isFastCloseSupported() {
        return true;
    }

    /** Returns the open streams and those whose acknowledged records wait to be uploaded after a fast close. */
    @Override
    public CompletableFuture<List<StreamMetadata>> getOpeningStreams() {
        return calls.call(own::listOpening)
                .thenApply(streams -> streams.stream().map(StreammetaStreamManager::metadata).toList());
    }

    /** Returns the streams in id order, without unknown ones. */
    @Override
    public CompletableFuture<List<StreamMetadata>> getStreams(List<Long> streamIds) {
        return calls.call(() -> all.describe(streamIds).toList())
                .thenApply(streams -> streams.stream().map(StreammetaStreamManager::metadata).toList());
    }

    @Override
    public StreamMetadataListener.Handle addMetadataListener(long streamId, StreamMetadataListener listener) {
        return listeners.add(streamId, listener);
    }

    @Override
    public CompletableFuture<Long> createStream(Map<String, String> tags) {
        return calls.call(() -> own.create(tags));
    }

    /** Opens a stream, as soon as its former owner has closed it. */
    @Override
    public CompletableFuture<StreamMetadata> openStream(long streamId, long epoch, Map<String, String> tags) {
        StreamToOpen stream = new StreamToOpen(streamId, epoch, tags, false);
        return calls.call(() -> own.open(stream)).thenApply(StreammetaStreamManager::metadata);
    }

    /** Trims a stream, also above the offsets that are committed: s3stream trims what it has appended. */
    @Override
    public CompletableFuture<Void> trimStream(long streamId, long epoch, long newStartOffset) {
        StreamToTrim stream = new StreamToTrim(streamId, epoch, newStartOffset, newStartOffset);
        return calls.call(() -> own.trim(stream)).thenApply(start -> null);
    }

    @Override
    public CompletableFuture<Void> closeStream(long streamId, long epoch, long endOffset) {
        StreamToClose stream = new StreamToClose(
                streamId, epoch, endOffset < 0 ? OptionalLong.empty() : OptionalLong.of(endOffset));
        return calls.close(() -> own.close(stream));
    }

    @Override
    public CompletableFuture<Void> deleteStream(long streamId, long epoch) {
        return calls.call(
                () -> own.delete(streamId, epoch == NO_EPOCH ? OptionalLong.empty() : OptionalLong.of(epoch)));
    }

    static StreamMetadata metadata(StreamDescription stream) {
        StreamMetadata metadata = new StreamMetadata(
                stream.streamId(),
                stream.epoch().orElse(NO_EPOCH),
                stream.startOffset(),
                stream.endOffset(),
                stream.isOpen() ? StreamState.OPENED : StreamState.CLOSED);
        stream.nodeId().ifPresent(metadata::nodeId);
        return metadata;
    }

    private static StreamMetadata metadata(OpeningStream stream) {
        return new StreamMetadata(
                stream.streamId(), stream.epoch(), stream.startOffset(), stream.endOffset(), StreamState.OPENED);
    }

    private static StreamMetadata metadata(OpenedStream stream) {
        return new StreamMetadata(
                stream.streamId(), stream.epoch(), stream.startOffset(), stream.nextOffset(), StreamState.OPENED);
    }
}
