package io.streammeta.client;

import java.util.Map;

/**
 * A stream to open.
 *
 * @param streamId the stream
 * @param epoch larger than its current epoch, or equal to repeat an open
 * @param tags labels, set only if the stream has none yet
 * @param reopen whether a stream that the node itself has open begins another range under a larger epoch. Otherwise it
 *     is rejected with {@code STREAM_NOT_CLOSED}
 */
public record StreamToOpen(long streamId, long epoch, Map<String, String> tags, boolean reopen) {
    /** A stream without new tags, which is not reopened. */
    public StreamToOpen(long streamId, long epoch) {
        this(streamId, epoch, Map.of(), false);
    }
}
