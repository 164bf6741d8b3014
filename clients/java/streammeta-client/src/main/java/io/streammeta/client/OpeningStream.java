package io.streammeta.client;

import java.util.OptionalLong;

/**
 * A stream that a node has to recover from its write-ahead log.
 *
 * @param streamId the stream
 * @param epoch the epoch of its range
 * @param startOffset the first visible offset
 * @param endOffset where the recovery continues
 * @param uploadEndOffset where it ends, for a pending upload of a closed stream. Empty: the stream is open
 */
public record OpeningStream(
        long streamId, long epoch, long startOffset, long endOffset, OptionalLong uploadEndOffset) {}
