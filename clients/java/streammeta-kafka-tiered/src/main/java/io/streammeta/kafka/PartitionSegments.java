package io.streammeta.kafka;

import java.util.Collection;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState;

/** The remote segments of one partition, in memory, with the lineage of each leader epoch. Safe for many threads. */
final class PartitionSegments {
    private final Map<Uuid, SegmentNote> notes = new HashMap<>();
    private final Map<Integer, EpochSegments> epochs = new HashMap<>();

    /** Adds a note, or replaces an older one. */
    synchronized void put(SegmentNote note) {
        RemoteLogSegmentMetadata metadata = note.metadata();
        Uuid segmentId = note.id().id();
        notes.put(segmentId, note);

        metadata.segmentLeaderEpochs().forEach((epoch, start) -> {
            EpochSegments segments = epochs.computeIfAbsent(epoch, added -> new EpochSegments());
            long end = endIn(epoch, metadata);
            segments.add(segmentId);
            if (note.isCopied()) {
                segments.noteCopied(end);
            }
            if (note.state() == RemoteLogSegmentState.COPY_SEGMENT_FINISHED) {
                segments.show(start, end, segmentId);
            } else {
                segments.hide(start, segmentId);
            }
        });
    }

    synchronized void remove(Uuid segmentId) {
        SegmentNote removed = notes.remove(segmentId);
        if (removed != null) {
            // The epochs stay: they know how far the partition was copied.
            removed.metadata()
                    .segmentLeaderEpochs()
                    .forEach((epoch, start) -> epochs.get(epoch).remove(start, segmentId));
        }
    }

    private static long endIn(int epoch, RemoteLogSegmentMetadata metadata) {
        Map.Entry<Integer, Long> next = metadata.segmentLeaderEpochs().higherEntry(epoch);
        return next == null ? metadata.endOffset() : next.getValue() - 1;
    }

    synchronized boolean isEmpty() {
        return notes.isEmpty();
    }

    synchronized Optional<SegmentNote> note(Uuid segmentId) {
        return Optional.ofNullable(notes.get(segmentId));
    }

    /** Returns the readable segment with an offset of a leader epoch. */
    synchronized Optional<RemoteLogSegmentMetadata> find(int epoch, long offset) {
        EpochSegments segments = epochs.get(epoch);
        return segments == null
                ? Optional.empty()
                : segments.find(offset).map(segmentId -> notes.get(segmentId).metadata());
    }

    /** Returns the highest offset of a leader epoch that was ever copied, also after its deletion. */
    synchronized Optional<Long> highestOffset(int epoch) {
        EpochSegments segments = epochs.get(epoch);
        return segments == null ? Optional.empty() : segments.highestOffset();
    }

    /** Returns the segments in all states, by start offset. */
    synchronized List<RemoteLogSegmentMetadata> list() {
        return sorted(notes.values());
    }

    /** Returns the segments of a leader epoch in all states, by start offset. */
    synchronized List<RemoteLogSegmentMetadata> list(int epoch) {
        EpochSegments segments = epochs.get(epoch);
        return segments == null
                ? List.of()
                : sorted(segments.segmentIds().stream().map(notes::get).toList());
    }

    private static List<RemoteLogSegmentMetadata> sorted(Collection<SegmentNote> notes) {
        return notes.stream()
                .map(SegmentNote::metadata)
                .sorted(Comparator.comparingLong(RemoteLogSegmentMetadata::startOffset))
                .toList();
    }

    /** Returns the notes of copies that are in progress, or whose broker has ended. */
    synchronized List<SegmentNote> listUnfinished() {
        return notes.values().stream()
                .filter(note -> note.state() == RemoteLogSegmentState.COPY_SEGMENT_STARTED)
                .toList();
    }
}
