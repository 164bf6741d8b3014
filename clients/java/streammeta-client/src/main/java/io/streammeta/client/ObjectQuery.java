package io.streammeta.client;

import java.util.OptionalLong;

/**
 * Asks for the objects that contain a range of a stream.
 *
 * @param streamId the stream
 * @param startOffset the first offset, at or above the stream's start
 * @param endOffset the offset after the last one, empty to go as far as the limit allows
 * @param limit the number of objects, 1 to 10000
 */
public record ObjectQuery(long streamId, long startOffset, OptionalLong endOffset, int limit) {
    io.streammeta.v1.ObjectQuery toWire() {
        var query = io.streammeta.v1.ObjectQuery.newBuilder()
                .setStreamId(streamId)
                .setStartOffset(startOffset)
                .setLimit(limit);
        endOffset.ifPresent(query::setEndOffset);
        return query.build();
    }
}
