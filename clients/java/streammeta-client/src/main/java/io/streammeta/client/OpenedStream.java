package io.streammeta.client;

/**
 * A stream that a node owns.
 *
 * @param streamId the stream
 * @param epoch the epoch it was opened with
 * @param startOffset the first visible offset
 * @param nextOffset the offset at which the next commit must start
 */
public record OpenedStream(long streamId, long epoch, long startOffset, long nextOffset) {}
