package io.streammeta.kafka;

import io.streammeta.client.KeyFollower;
import io.streammeta.client.KeyValue;
import io.streammeta.client.KeyValues;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.KeyConflictException;
import io.streammeta.client.errors.StreammetaException;
import java.util.Collection;
import java.util.HashSet;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.Optional;
import java.util.Set;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.function.Function;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.server.log.remote.storage.RemoteLogMetadataManager;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentId;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadataUpdate;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState;
import org.apache.kafka.server.log.remote.storage.RemotePartitionDeleteMetadata;
import org.apache.kafka.server.log.remote.storage.RemotePartitionDeleteState;
import org.apache.kafka.server.log.remote.storage.RemoteResourceNotFoundException;
import org.apache.kafka.server.log.remote.storage.RemoteStorageException;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Metadata of remote log segments as keys of the controllers. Kafka creates it, by
 * {@code remote.log.metadata.manager.class.name}.
 *
 * <p>Each segment is one key. Its state changes by compare-and-set on the key's version, so that two brokers which both
 * lead a partition never undo each other's changes. Every broker follows the keys of all segments, and reads from
 * memory. A change completes when it has been reported to this broker: a read after it sees it.
 *
 * <p>Futures fail with {@link RemoteStorageException}. After one the change may still be stored, and a repeat succeeds.
 */
public final class StreammetaRemoteLogMetadataManager implements RemoteLogMetadataManager {
    private static final Logger LOG = LoggerFactory.getLogger(StreammetaRemoteLogMetadataManager.class);
    /** The time in which the controllers report a change, or all keys of a start, before a call fails. */
    private static final long REPORT_SECONDS = 30;

    private final SegmentCache cache = new SegmentCache();
    /** Segments that this process copies, or has copied. */
    private final Set<RemoteLogSegmentId> ownCopies = ConcurrentHashMap.newKeySet();

    private StreammetaClient client;
    private KeyValues keys;
    private KeyFollower follower;

    /** Creates a manager, which {@link #configure} starts. */
    public StreammetaRemoteLogMetadataManager() {}

    /** Begins to follow the segments, in the background. The controllers need not run yet. */
    @Override
    public void configure(Map<String, ?> configs) {
        PluginConfig config = new PluginConfig(configs);
        client = config.newClient();
        keys = client.keyValues(config.namespace());
        follower = client.followKeys(config.namespace(), "", cache);
    }

    @Override
    public CompletableFuture<Void> addRemoteLogSegmentMetadata(RemoteLogSegmentMetadata metadata) {
        Objects.requireNonNull(metadata, "metadata");
        if (metadata.state() != RemoteLogSegmentState.COPY_SEGMENT_STARTED) {
            throw new IllegalArgumentException("segment " + metadata.remoteLogSegmentId() + " is in state "
                    + metadata.state() + ", a new one is in COPY_SEGMENT_STARTED");
        }
        RemoteLogSegmentId id = metadata.remoteLogSegmentId();
        String key = SegmentKeys.of(id);
        ownCopies.add(id);
        return asStorageErrors(
                keys.putIfAbsent(key, SegmentNote.ofNew(metadata).toBytes())
                        .thenCompose(version -> cache.awaitVersion(key, version)));
    }

    @Override
    public CompletableFuture<Void> updateRemoteLogSegmentMetadata(RemoteLogSegmentMetadataUpdate update) {
        Objects.requireNonNull(update, "update");
        if (update.state() == RemoteLogSegmentState.COPY_SEGMENT_STARTED) {
            throw new IllegalArgumentException("COPY_SEGMENT_STARTED is the first state of segment "
                    + update.remoteLogSegmentId() + ". Next step: add it instead");
        }
        Optional<SegmentNote> known = cache.note(update.remoteLogSegmentId())
                .filter(note -> isStep(note.state(), update.state()));
        return asStorageErrors(known.isPresent() ? change(known.get(), update) : changeStored(update));
    }

    /** Reads the note from the controllers, and changes it. */
    private CompletableFuture<Void> changeStored(RemoteLogSegmentMetadataUpdate update) {
        String key = SegmentKeys.of(update.remoteLogSegmentId());
        return keys.get(key).thenCompose(stored -> {
            if (stored.isEmpty()) {
                return update.state() == RemoteLogSegmentState.COPY_SEGMENT_FINISHED
                        ? CompletableFuture.failedFuture(new RemoteResourceNotFoundException("segment "
                                + update.remoteLogSegmentId() + " was deleted, or was never added"))
                        : cache.awaitDeletion(key); // a repeat, or another broker was first
            }
            SegmentNote note = SegmentNote.of(stored.get());
            if (note.state() == update.state()) {
                return cache.awaitVersion(key, note.version());
            }
            if (!isStep(note.state(), update.state())) {
                return CompletableFuture.failedFuture(new RemoteStorageException("segment "
                        + update.remoteLogSegmentId() + " is in state " + note.state() + " and can't change to "
                        + update.state() + ": another broker leads the partition now"));
            }
            return change(note, update);
        });
    }

    private static boolean isStep(RemoteLogSegmentState from, RemoteLogSegmentState to) {
        return from != to && RemoteLogSegmentState.isValidTransition(from, to);
    }

    private CompletableFuture<Void> change(SegmentNote note, RemoteLogSegmentMetadataUpdate update) {
        String key = SegmentKeys.of(note.id());
        CompletableFuture<Void> changed = update.state() == RemoteLogSegmentState.DELETE_SEGMENT_FINISHED
                // The named objects of the segment go with their key.
                ? keys.deleteIfVersion(key, note.version()).thenCompose(none -> cache.awaitDeletion(key))
                : keys.putIfVersion(key, note.with(update).toBytes(), note.version())
                        .thenCompose(version -> cache.awaitVersion(key, version));
        // Each conflict is a change of another broker, and there are few states: the repeats end.
        return changed.handle((none, error) -> error == null
                        ? CompletableFuture.<Void>completedFuture(null)
                        : StreammetaClient.cause(error) instanceof KeyConflictException
                                ? changeStored(update)
                                : CompletableFuture.<Void>failedFuture(StreammetaClient.cause(error)))
                .thenCompose(Function.identity())
                .thenRun(() -> ownCopies.remove(note.id()));
    }

    @Override
    public Optional<RemoteLogSegmentMetadata> remoteLogSegmentMetadata(
            TopicIdPartition partition, int epochForOffset, long offset) throws RemoteStorageException {
        return segments(partition).find(epochForOffset, offset);
    }

    @Override
    public Optional<RemoteLogSegmentMetadata> nextSegmentWithTxnIndex(
            TopicIdPartition partition, int epoch, long offset) throws RemoteStorageException {
        PartitionSegments segments = segments(partition);
        Optional<RemoteLogSegmentMetadata> found = segments.find(epoch, offset);
        while (found.isPresent() && found.get().isTxnIdxEmpty()) {
            found = segments.find(epoch, found.get().endOffset() + 1);
        }
        return found;
    }

    @Override
    public Optional<Long> highestOffsetForEpoch(TopicIdPartition partition, int leaderEpoch)
            throws RemoteStorageException {
        return segments(partition).highestOffset(leaderEpoch);
    }

    @Override
    public Iterator<RemoteLogSegmentMetadata> listRemoteLogSegments(TopicIdPartition partition)
            throws RemoteStorageException {
        return segments(partition).list().iterator();
    }

    @Override
    public Iterator<RemoteLogSegmentMetadata> listRemoteLogSegments(TopicIdPartition partition, int leaderEpoch)
            throws RemoteStorageException {
        return segments(partition).list(leaderEpoch).iterator();
    }

    @Override
    public long remoteLogSize(TopicIdPartition partition, int leaderEpoch) throws RemoteStorageException {
        return segments(partition).list(leaderEpoch).stream()
                .mapToLong(RemoteLogSegmentMetadata::segmentSizeInBytes)
                .sum();
    }

    private PartitionSegments segments(TopicIdPartition partition) throws RemoteStorageException {
        Objects.requireNonNull(partition, "partition");
        try {
            // A read need not wait for the segments of all other partitions.
            follower.listed(SegmentKeys.prefixOf(partition)).get(REPORT_SECONDS, TimeUnit.SECONDS);
        } catch (TimeoutException error) {
            throw new RemoteStorageException("the controllers have not listed the segments within " + REPORT_SECONDS
                    + " s. Next step: check that they run and lead, and the option " + PluginConfig.ENDPOINTS);
        } catch (ExecutionException error) {
            throw storageError(error.getCause());
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new RemoteStorageException("the thread was interrupted while it waited for the segments", error);
        }
        return cache.partition(partition);
    }

    @Override
    public boolean isReady(TopicIdPartition partition) {
        return follower.listed().isDone() && !follower.listed().isCompletedExceptionally();
    }

    /**
     * Prepares the broker for partitions that it leads or follows. Copies of a broker that led before and did not finish
     * them are deleted, with their objects, in the background. If that broker still runs, the rest of its copy fails.
     */
    @Override
    public void onPartitionLeadershipChanges(
            Set<TopicIdPartition> leaderPartitions, Set<TopicIdPartition> followerPartitions) {
        cache.assign(leaderPartitions);
        cache.assign(followerPartitions);
        Set<TopicIdPartition> leading = new HashSet<>(leaderPartitions);
        follower.listed().thenRun(() -> leading.forEach(this::deleteUnfinished));
    }

    private void deleteUnfinished(TopicIdPartition partition) {
        for (SegmentNote note : cache.partition(partition).listUnfinished()) {
            if (ownCopies.contains(note.id())) {
                continue;
            }
            // Only in the state that was seen: a copy that has finished since stays.
            keys.deleteIfVersion(SegmentKeys.of(note.id()), note.version()).whenComplete((none, error) -> {
                if (error == null) {
                    LOG.info("deleted segment {}, whose copy another broker did not finish", note.id());
                } else {
                    LOG.info("kept unfinished segment {}: {}", note.id(), error.getMessage());
                }
            });
        }
    }

    @Override
    public void onStopPartitions(Set<TopicIdPartition> partitions) {
        cache.unassign(partitions);
    }

    /**
     * Deletes all segments of a partition whose deletion is finished, with their objects. Kafka 3.9 to 4.4 don't call it:
     * they delete each segment.
     */
    @Override
    public CompletableFuture<Void> putRemotePartitionDeleteMetadata(RemotePartitionDeleteMetadata metadata) {
        Objects.requireNonNull(metadata, "metadata");
        if (metadata.state() != RemotePartitionDeleteState.DELETE_PARTITION_FINISHED) {
            return CompletableFuture.completedFuture(null);
        }
        return asStorageErrors(keys.listKeys(SegmentKeys.prefixOf(metadata.topicIdPartition()))
                .toList()
                .thenApply(found -> found.stream().map(KeyValue::key).toList())
                .thenCompose(found -> keys.deleteAll(found).thenCompose(none -> awaitDeletions(found))));
    }

    private CompletableFuture<Void> awaitDeletions(Collection<String> deleted) {
        List<CompletableFuture<Void>> waits = deleted.stream().map(cache::awaitDeletion).toList();
        return CompletableFuture.allOf(waits.toArray(CompletableFuture<?>[]::new));
    }

    private static CompletableFuture<Void> asStorageErrors(CompletableFuture<Void> future) {
        return future.orTimeout(REPORT_SECONDS, TimeUnit.SECONDS)
                .exceptionallyCompose(error ->
                        CompletableFuture.failedFuture(storageError(StreammetaClient.cause(error))));
    }

    private static RemoteStorageException storageError(Throwable error) {
        if (error instanceof RemoteStorageException known) {
            return known;
        }
        if (error instanceof TimeoutException) {
            return new RemoteStorageException(
                    "the controllers have not reported the change within " + REPORT_SECONDS + " s. It may be stored");
        }
        boolean isOfClient = error instanceof StreammetaException || error instanceof CancellationException;
        return new RemoteStorageException(isOfClient ? error.getMessage() : error.toString(), error);
    }

    @Override
    public void close() {
        if (client != null) {
            follower.close();
            client.close();
        }
    }
}
