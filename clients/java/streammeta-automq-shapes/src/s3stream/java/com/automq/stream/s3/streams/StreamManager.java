package com.automq.stream.s3.streams;

import com.automq.stream.s3.metadata.StreamMetadata;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;

/** Shape of the streams of a node. */
public interface StreamManager {
    default boolean isFastCloseSupported() {
        return false;
    }

    CompletableFuture<List<StreamMetadata>> getOpeningStreams();

    CompletableFuture<List<StreamMetadata>> getStreams(List<Long> streamIds);

    StreamMetadataListener.Handle addMetadataListener(long streamId, StreamMetadataListener listener);

    CompletableFuture<Long> createStream(Map<String, String> tags);

    default CompletableFuture<StreamMetadata> openStream(long streamId, long epoch) {
        return openStream(streamId, epoch, Map.of());
    }

    CompletableFuture<StreamMetadata> openStream(long streamId, long epoch, Map<String, String> tags);

    CompletableFuture<Void> trimStream(long streamId, long epoch, long newStartOffset);

    default CompletableFuture<Void> closeStream(long streamId, long epoch) {
        return closeStream(streamId, epoch, -1);
    }

    CompletableFuture<Void> closeStream(long streamId, long epoch, long endOffset);

    CompletableFuture<Void> deleteStream(long streamId, long epoch);
}
