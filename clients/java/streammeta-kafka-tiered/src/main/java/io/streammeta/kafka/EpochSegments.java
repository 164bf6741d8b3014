package io.streammeta.kafka;

import java.util.HashSet;
import java.util.Map;
import java.util.NavigableMap;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import org.apache.kafka.common.Uuid;

/**
 * The remote segments with records of one leader epoch.
 *
 * <p>Leaders may copy the same offsets twice, in segments with other bounds. No readable part contains another one: a
 * part that another contains is hidden, but listed until Kafka deletes it. So the ends of the readable parts grow with
 * their starts, and the part with the nearest start below an offset answers for it. Records of one epoch at one offset
 * are equal in all copies.
 */
final class EpochSegments {
    private final NavigableMap<Long, Part> readable = new TreeMap<>();
    private final Set<Uuid> segmentIds = new HashSet<>();
    private Long highestOffset; // null before the first finished copy

    /** The offsets up to {@code end}, inclusive, that a segment has of this epoch. */
    private record Part(long end, Uuid segmentId) {}

    void add(Uuid segmentId) {
        segmentIds.add(segmentId);
    }

    /** Notes that the offsets from start to end, both inclusive, were copied. They may have been deleted since. */
    void noteCopied(long end) {
        highestOffset = highestOffset == null ? end : Math.max(highestOffset, end);
    }

    void show(long start, long end, Uuid segmentId) {
        Map.Entry<Long, Part> before = readable.floorEntry(start);
        boolean isContained = before != null
                && (before.getKey() == start ? before.getValue().end > end : before.getValue().end >= end);
        if (isContained) {
            return;
        }
        // Ends grow with starts: the contained parts are the next ones.
        var later = readable.tailMap(start, true).values().iterator();
        while (later.hasNext() && later.next().end <= end) {
            later.remove();
        }
        readable.put(start, new Part(end, segmentId));
    }

    void hide(long start, Uuid segmentId) {
        Part part = readable.get(start);
        if (part != null && part.segmentId.equals(segmentId)) {
            readable.remove(start);
        }
    }

    void remove(long start, Uuid segmentId) {
        hide(start, segmentId);
        segmentIds.remove(segmentId);
    }

    /** Returns the segment with an offset that is readable. */
    Optional<Uuid> find(long offset) {
        Map.Entry<Long, Part> entry = readable.floorEntry(offset);
        return entry == null || offset > entry.getValue().end
                ? Optional.empty()
                : Optional.of(entry.getValue().segmentId);
    }

    /** Returns the highest offset that was ever copied, also after its deletion. */
    Optional<Long> highestOffset() {
        return Optional.ofNullable(highestOffset);
    }

    /** Returns all segments that are not deleted, in no order. */
    Set<Uuid> segmentIds() {
        return segmentIds;
    }
}
