package io.streammeta.client;

import java.util.OptionalLong;

/**
 * A stream to close.
 *
 * @param streamId the stream
 * @param epoch the epoch it was opened with
 * @param endOffset for a fast close the owner's acknowledged end, to be uploaded later. Empty: everything acknowledged
 *     is committed
 */
public record StreamToClose(long streamId, long epoch, OptionalLong endOffset) {
    /** A stream whose acknowledged records are all committed. */
    public StreamToClose(long streamId, long epoch) {
        this(streamId, epoch, OptionalLong.empty());
    }
}
