package io.streammeta.automq;

import com.automq.stream.s3.exceptions.AutoMQException;
import com.automq.stream.s3.metadata.S3ObjectMetadata;
import com.automq.stream.s3.metadata.S3ObjectType;
import com.automq.stream.s3.metadata.StreamOffsetRange;
import com.automq.stream.s3.objects.CommitStreamSetObjectHook;
import com.automq.stream.s3.objects.CommitStreamSetObjectRequest;
import com.automq.stream.s3.objects.CommitStreamSetObjectResponse;
import com.automq.stream.s3.objects.CompactStreamObjectRequest;
import com.automq.stream.s3.objects.ObjectManager;
import io.streammeta.client.NodeObjects;
import io.streammeta.client.ObjectKind;
import io.streammeta.client.ObjectList;
import io.streammeta.client.ObjectSlice;
import io.streammeta.client.Page;
import io.streammeta.client.Pages;
import io.streammeta.client.StoredObjects;
import io.streammeta.client.StreamObject;
import io.streammeta.client.StreamSetObject;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;

/** Objects of one node in the metadata of streammeta. {@link AutomqMetadata} makes it. */
final class StreammetaObjectManager implements ObjectManager {
    /** The largest limit of the controllers. */
    private static final int MAX_LOCATED = 10_000;
    /** Stands for an unknown time or position. */
    private static final long UNKNOWN = -1;

    private final int nodeId;
    private final NodeObjects own;
    private final StoredObjects all;
    private final DestroyedObjects destroyed;
    private final Calls calls;
    private volatile CommitStreamSetObjectHook hook = request -> CompletableFuture.completedFuture(null);

    StreammetaObjectManager(
            int nodeId, NodeObjects own, StoredObjects all, DestroyedObjects destroyed, Calls calls) {
        this.nodeId = nodeId;
        this.own = own;
        this.all = all;
        this.destroyed = destroyed;
        this.calls = calls;
    }

    @Override
    public CompletableFuture<Long> prepareObject(int count, long ttl) {
        return calls.call(() -> own.prepare(count, Duration.ofMillis(ttl)))
                .thenApply(prepared -> prepared.firstObjectId());
    }

    /**
     * Commits an upload or a compaction. Fails with
     * {@link com.automq.stream.s3.exceptions.CompactedObjectsNotFoundException} if one of its objects is gone.
     */
    @Override
    public CompletableFuture<CommitStreamSetObjectResponse> commitStreamSetObject(
            CommitStreamSetObjectRequest request) {
        var commit = Commits.of(request);
        CompletableFuture<CommitStreamSetObjectResponse> committed = calls.commit(() -> own.commit(commit)
                .thenApply(verdict -> verdict.requireCommitted("commit of object " + request.getObjectId()))
                .thenApply(verdict -> new CommitStreamSetObjectResponse()));
        // The caller does not wait for the hook, nor for its errors.
        committed.thenAccept(response -> hook.onCommitSuccess(request));
        return committed;
    }

    @Override
    public CompletableFuture<Void> compactStreamObject(CompactStreamObjectRequest request) {
        var commit = Commits.of(request);
        return calls.commit(() -> own.commit(commit)
                .thenAccept(verdict -> verdict.requireCommitted("commit of object " + request.getObjectId())));
    }

    /**
     * Returns the objects that contain a range, contiguous. Waits until they reach the end or the limit, because records
     * of a former owner may still be uploaded.
     */
    @Override
    public CompletableFuture<List<S3ObjectMetadata>> getObjects(
            long streamId, long startOffset, long endOffset, int limit) {
        OptionalLong end = optional(endOffset);
        int count = Math.min(limit, MAX_LOCATED);
        return Calls.poll(
                        () -> calls.call(() -> all.locate(streamId, startOffset, end, count))
                                .thenApply(list -> checked(list, streamId, startOffset)),
                        slices -> slices.size() >= count || reaches(slices, endOffset))
                .thenApply(slices -> slices.stream().map(slice -> metadata(streamId, slice)).toList());
    }

    private static List<ObjectSlice> checked(ObjectList list, long streamId, long startOffset) {
        if (!list.error().isSuccess()) {
            throw new AutoMQException(
                    "stream " + streamId + " has no objects at " + startOffset + ": " + list.error());
        }
        if (list.lostEndOffset().isPresent()) {
            throw new AutoMQException("stream " + streamId + " has lost the offsets from " + startOffset + " to "
                    + list.lostEndOffset().getAsLong() + ", read on from there");
        }
        return list.objects();
    }

    private static boolean reaches(List<ObjectSlice> slices, long endOffset) {
        return endOffset < 0
                || !slices.isEmpty() && slices.get(slices.size() - 1).offsets().end() >= endOffset;
    }

    /**
     * Returns whether an object that {@link #getObjects} has returned may still be read, without a call: false once its
     * end is known here, moments after it is committed.
     */
    @Override
    public boolean isObjectExist(long objectId) {
        return !destroyed.contains(objectId);
    }

    @Override
    public CompletableFuture<List<S3ObjectMetadata>> getServerObjects() {
        return calls.call(() -> all.listStreamSetObjects(nodeId, true).toList())
                .thenApply(objects -> objects.stream().map(StreammetaObjectManager::metadata).toList());
    }

    @Override
    public CompletableFuture<List<S3ObjectMetadata>> getStreamObjects(
            long streamId, long startOffset, long endOffset, int limit) {
        return calls.call(() -> first(all.listStreamObjects(streamId, startOffset, optional(endOffset)), limit))
                .thenApply(objects -> objects.stream().map(object -> metadata(streamId, object)).toList());
    }

    /** Returns the first items of a listing, and requests no page beyond them. */
    private static <T> CompletableFuture<List<T>> first(Pages<T> pages, int limit) {
        return first(pages, "", limit, new ArrayList<>());
    }

    private static <T> CompletableFuture<List<T>> first(Pages<T> pages, String token, int limit, List<T> items) {
        return pages.page(token).thenCompose((Page<T> page) -> {
            page.items().stream().limit((long) limit - items.size()).forEach(items::add);
            return page.isLast() || items.size() >= limit
                    ? CompletableFuture.completedFuture(items)
                    : first(pages, page.nextToken(), limit, items);
        });
    }

    @Override
    public CompletableFuture<Integer> getObjectsCount() {
        return calls.call(all::count).thenApply(count -> (int) Math.min(count, Integer.MAX_VALUE));
    }

    @Override
    public void setCommitStreamSetObjectHook(CommitStreamSetObjectHook hook) {
        this.hook = hook;
    }

    private static S3ObjectMetadata metadata(long streamId, ObjectSlice slice) {
        StreamOffsetRange range =
                new StreamOffsetRange(streamId, slice.offsets().start(), slice.offsets().end());
        return new S3ObjectMetadata(
                slice.objectId(),
                // s3stream distinguishes composites by their attributes.
                slice.kind() == ObjectKind.STREAM_SET ? S3ObjectType.STREAM_SET : S3ObjectType.STREAM,
                List.of(range),
                UNKNOWN,
                UNKNOWN,
                slice.facts().size(),
                UNKNOWN,
                slice.facts().attributes());
    }

    private static S3ObjectMetadata metadata(StreamSetObject object) {
        return new S3ObjectMetadata(
                object.objectId(),
                S3ObjectType.STREAM_SET,
                object.ranges().stream()
                        .map(slice -> new StreamOffsetRange(
                                slice.streamId(), slice.startOffset(), slice.endOffset()))
                        .toList(),
                object.dataTimeMs(),
                object.committedAtMs(),
                object.facts().size(),
                object.orderId(),
                object.facts().attributes());
    }

    private static S3ObjectMetadata metadata(long streamId, StreamObject object) {
        return new S3ObjectMetadata(
                object.objectId(),
                S3ObjectType.STREAM,
                List.of(new StreamOffsetRange(
                        streamId, object.offsets().start(), object.offsets().end())),
                object.committedAtMs(),
                object.committedAtMs(),
                object.facts().size(),
                UNKNOWN,
                object.facts().attributes());
    }

    private static OptionalLong optional(long endOffset) {
        return endOffset < 0 ? OptionalLong.empty() : OptionalLong.of(endOffset);
    }
}
