package io.streammeta.client;

import java.util.OptionalLong;

/**
 * Facts of an object's bytes that its writer knows.
 *
 * @param size the size in bytes, for a composite the sum of the linked blocks
 * @param attributes the object attributes word of docs/format.md
 * @param minTimestampMs no record is older, in ms since 1970. Empty if unknown
 * @param maxTimestampMs no record is newer. Both are known or neither
 * @param crc32c the CRC-32C of all bytes, 0 to 2^32 - 1. Empty if unknown
 */
public record ObjectFacts(
        long size,
        int attributes,
        OptionalLong minTimestampMs,
        OptionalLong maxTimestampMs,
        OptionalLong crc32c) {
    /** Returns the facts of an object of which only the size is known. */
    public static ObjectFacts ofSize(long size) {
        return new ObjectFacts(size, 0, OptionalLong.empty(), OptionalLong.empty(), OptionalLong.empty());
    }

    /** Returns these facts with another attributes word. */
    public ObjectFacts withAttributes(int attributes) {
        return new ObjectFacts(size, attributes, minTimestampMs, maxTimestampMs, crc32c);
    }

    /** Returns these facts with the times of the oldest and the newest record. */
    public ObjectFacts withTimestamps(long minTimestampMs, long maxTimestampMs) {
        return new ObjectFacts(
                size, attributes, OptionalLong.of(minTimestampMs), OptionalLong.of(maxTimestampMs), crc32c);
    }

    /** Returns these facts with a checksum. */
    public ObjectFacts withCrc32c(long crc32c) {
        return new ObjectFacts(size, attributes, minTimestampMs, maxTimestampMs, OptionalLong.of(crc32c));
    }
}
