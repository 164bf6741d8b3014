package io.streammeta.client;

/**
 * Offsets of a stream, half-open.
 *
 * @param start the first offset
 * @param end the offset after the last one
 */
public record OffsetRange(long start, long end) {}
