package io.streammeta.kafka;

import io.streammeta.client.KeyListener;
import io.streammeta.client.KeyValue;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentId;

/**
 * All segments of the namespace, as the controllers reported them. A change of this process is applied like those of
 * others, when it is reported, so that all brokers apply the same changes in the same order.
 */
final class SegmentCache implements KeyListener {
    private static final PartitionSegments NONE = new PartitionSegments();

    private final Map<TopicIdPartition, PartitionSegments> partitions = new ConcurrentHashMap<>();

    // Guarded by this:
    private final Map<String, SegmentNote> notes = new HashMap<>();
    private final Map<String, List<Wait>> waits = new HashMap<>();
    private final Set<TopicIdPartition> assigned = new HashSet<>();

    private record Wait(long version, CompletableFuture<Void> done) {}

    @Override
    public synchronized void onPut(KeyValue value) {
        SegmentNote note = SegmentNote.of(value);
        notes.put(value.key(), note);
        partitions
                .computeIfAbsent(note.id().topicIdPartition(), added -> new PartitionSegments())
                .put(note);
        complete(value.key(), note.version());
    }

    @Override
    public synchronized void onDeleted(String key) {
        SegmentNote note = notes.remove(key);
        if (note != null) { // else the key is not a segment's
            TopicIdPartition partition = note.id().topicIdPartition();
            partitions.get(partition).remove(note.id().id());
            dropIfUnused(partition);
        }
        complete(key, Long.MAX_VALUE); // segment ids are never used again
    }

    private void complete(String key, long version) {
        List<Wait> present = waits.remove(key);
        if (present == null) {
            return;
        }
        List<Wait> rest = new ArrayList<>();
        for (Wait wait : present) {
            if (wait.version <= version) {
                wait.done.complete(null);
            } else if (!wait.done.isDone()) {
                rest.add(wait);
            }
        }
        if (!rest.isEmpty()) {
            waits.put(key, rest);
        }
    }

    /** Returns a future that completes when a key has a version here, or was deleted. The caller bounds the wait. */
    synchronized CompletableFuture<Void> awaitVersion(String key, long version) {
        SegmentNote note = notes.get(key);
        return note != null && note.version() >= version
                ? CompletableFuture.completedFuture(null)
                : addWait(key, version);
    }

    /** Returns a future that completes when a key, which the controllers have deleted, is gone here. */
    synchronized CompletableFuture<Void> awaitDeletion(String key) {
        return notes.containsKey(key) ? addWait(key, Long.MAX_VALUE) : CompletableFuture.completedFuture(null);
    }

    private CompletableFuture<Void> addWait(String key, long version) {
        Wait wait = new Wait(version, new CompletableFuture<>());
        waits.computeIfAbsent(key, added -> new ArrayList<>()).add(wait);
        // A wait that its caller gave up leaves no trace.
        wait.done.whenComplete((none, error) -> forget(key, wait));
        return wait.done;
    }

    private synchronized void forget(String key, Wait wait) {
        waits.computeIfPresent(key, (same, present) -> {
            present.remove(wait);
            return present.isEmpty() ? null : present;
        });
    }

    /** Returns the note of a segment, as it was reported last. */
    Optional<SegmentNote> note(RemoteLogSegmentId id) {
        return partition(id.topicIdPartition()).note(id.id());
    }

    PartitionSegments partition(TopicIdPartition partition) {
        return partitions.getOrDefault(partition, NONE);
    }

    /** Keeps the highest offsets of partitions, also while they have no segments. */
    synchronized void assign(Collection<TopicIdPartition> added) {
        assigned.addAll(added);
    }

    synchronized void unassign(Collection<TopicIdPartition> stopped) {
        assigned.removeAll(stopped);
        stopped.forEach(this::dropIfUnused);
    }

    private void dropIfUnused(TopicIdPartition partition) {
        PartitionSegments segments = partitions.get(partition);
        if (segments != null && segments.isEmpty() && !assigned.contains(partition)) {
            partitions.remove(partition);
        }
    }
}
