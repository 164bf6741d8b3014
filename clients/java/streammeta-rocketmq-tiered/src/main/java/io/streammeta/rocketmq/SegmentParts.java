package io.streammeta.rocketmq;

import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;

/**
 * Parts of a segment in memory, 16 bytes each: objects that follow each other without a gap. Any thread may read while
 * one appends.
 */
final class SegmentParts {
    /**
     * A range of a part.
     *
     * @param objectId the object
     * @param start where the range begins in the object
     * @param length its bytes
     */
    record Slice(long objectId, long start, int length) {}

    private long[] ends = new long[4];
    private long[] objectIds = new long[4];
    private int count;

    /** Appends a part. */
    synchronized void append(long objectId, long size) {
        if (count == ends.length) {
            ends = Arrays.copyOf(ends, 2 * count);
            objectIds = Arrays.copyOf(objectIds, 2 * count);
        }
        ends[count] = size() + size;
        objectIds[count] = objectId;
        count++;
    }

    /** Returns the bytes of all parts. */
    synchronized long size() {
        return count == 0 ? 0 : ends[count - 1];
    }

    /**
     * Returns the ranges that together are {@code length} bytes from a position on.
     *
     * @throws IndexOutOfBoundsException if the segment ends before
     */
    synchronized List<Slice> slices(long position, int length) {
        if (position < 0 || position + length > size()) {
            throw new IndexOutOfBoundsException(
                    "bytes " + position + " to " + (position + length) + " of a segment of " + size() + " bytes");
        }
        List<Slice> slices = new ArrayList<>();
        int found = Arrays.binarySearch(ends, 0, count, position + 1);
        long end = position + length;
        for (int part = found < 0 ? -found - 1 : found; part < count && startOf(part) < end; part++) {
            long from = Math.max(position, startOf(part));
            slices.add(new Slice(objectIds[part], from - startOf(part), (int) (Math.min(end, ends[part]) - from)));
        }
        return slices;
    }

    private long startOf(int part) {
        return part == 0 ? 0 : ends[part - 1];
    }
}
