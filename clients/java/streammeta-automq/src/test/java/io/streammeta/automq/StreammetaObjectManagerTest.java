package io.streammeta.automq;

import static io.streammeta.automq.Node.get;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.s3.compact.CompactOperations;
import com.automq.stream.s3.exceptions.AutoMQException;
import com.automq.stream.s3.exceptions.CompactedObjectsNotFoundException;
import com.automq.stream.s3.exceptions.ObjectNotCommittedException;
import com.automq.stream.s3.metadata.S3ObjectMetadata;
import com.automq.stream.s3.metadata.S3ObjectType;
import com.automq.stream.s3.objects.CommitStreamSetObjectRequest;
import com.automq.stream.s3.objects.CompactStreamObjectRequest;
import io.streammeta.client.errors.OffsetMismatchException;
import io.streammeta.client.errors.StreamFencedException;
import io.streammeta.testkit.Controllers;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.function.BooleanSupplier;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class StreammetaObjectManagerTest {
    private static final int COMPOSITE = 1;

    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private Node node;
    private long streamId;

    @BeforeEach
    void open() {
        node = Node.open(CONTROLLERS.endpoints(), 21);
        streamId = node.openedStream();
    }

    @AfterEach
    void close() {
        node.close();
    }

    @Test
    void preparedIdsAreConsecutive() {
        long firstId = get(node.objects().prepareObject(3, 60_000));
        assertEquals(firstId + 3, get(node.objects().prepareObject(1, 60_000)));
    }

    @Test
    void anUploadIsFoundByItsStreamAndByItsNode() {
        long before = System.currentTimeMillis() - 60_000;
        long objectId = node.commit(streamId, 0, 10);

        List<S3ObjectMetadata> found = get(node.objects().getObjects(streamId, 3, 10, 10));
        assertEquals(1, found.size());
        assertEquals(objectId, found.get(0).objectId());
        assertEquals(S3ObjectType.STREAM_SET, found.get(0).getType());
        assertEquals(1000, found.get(0).objectSize());
        assertEquals(0, found.get(0).startOffset());
        assertEquals(10, found.get(0).endOffset());
        assertTrue(node.objects().isObjectExist(objectId));

        S3ObjectMetadata listed = get(node.objects().getServerObjects()).stream()
                .filter(object -> object.objectId() == objectId)
                .findFirst()
                .orElseThrow();
        assertEquals(objectId, listed.getOrderId());
        assertEquals(1000, listed.objectSize());
        assertEquals(0, listed.attributes());
        assertEquals(streamId, listed.getOffsetRanges().get(0).streamId());
        assertTrue(listed.committedTimestamp() > before);
        assertTrue(listed.dataTimeInMs() > before);
        assertTrue(get(node.objects().getObjectsCount()) >= 1);
    }

    @Test
    void aRepeatedCommitSucceedsAndTheHookHearsOfIt() throws Exception {
        BlockingQueue<Long> committed = new LinkedBlockingQueue<>();
        node.objects().setCommitStreamSetObjectHook(request -> {
            committed.add(request.getObjectId());
            return CompletableFuture.completedFuture(null);
        });
        CommitStreamSetObjectRequest request = Node.upload(node.prepare(), streamId, 0, 10);
        get(node.objects().commitStreamSetObject(request));
        get(node.objects().commitStreamSetObject(request));
        assertEquals(request.getObjectId(), committed.poll(5, TimeUnit.SECONDS));
        assertEquals(10, node.describe(streamId).endOffset());
    }

    @Test
    void errorsOfACommit() {
        node.commit(streamId, 0, 10);
        CommitStreamSetObjectRequest gap = Node.upload(node.prepare(), streamId, 11, 20);
        assertThrows(OffsetMismatchException.class, () -> get(node.objects().commitStreamSetObject(gap)));
        CommitStreamSetObjectRequest unknown = Node.upload(123_456_789, streamId, 10, 20);
        assertThrows(
                CompactedObjectsNotFoundException.class, () -> get(node.objects().commitStreamSetObject(unknown)));
    }

    @Test
    void aReaderWaitsForTheUploadOfTheFormerOwner() throws Exception {
        node.commit(streamId, 0, 10);
        get(node.streams().closeStream(streamId, 1, 20));
        try (Node next = Node.open(CONTROLLERS.endpoints(), 22)) {
            get(next.streams().openStream(streamId, 2, Map.of()));
            CompletableFuture<List<S3ObjectMetadata>> found = next.objects().getObjects(streamId, 0, 20, 10);
            Thread.sleep(200);
            assertFalse(found.isDone());
            assertEquals(1, get(next.objects().getObjects(streamId, 0, -1, 10)).size());

            node.commit(streamId, 10, 20);
            assertEquals(2, get(found).size());
        }
    }

    @Test
    void aLimitEndsAList() {
        for (int offset = 0; offset < 50; offset += 10) {
            node.commitStreamObject(streamId, offset, offset + 10);
        }
        assertEquals(2, get(node.objects().getObjects(streamId, 0, 50, 2)).size());
        assertEquals(5, get(node.objects().getObjects(streamId, 0, 50, Integer.MAX_VALUE)).size());

        List<S3ObjectMetadata> some = get(node.objects().getStreamObjects(streamId, 15, 45, 3));
        assertEquals(List.of(10L, 20L, 30L), some.stream().map(S3ObjectMetadata::startOffset).toList());
        assertEquals(5, get(node.objects().getStreamObjects(streamId, 0, -1, Integer.MAX_VALUE)).size());
        assertEquals(S3ObjectType.STREAM, some.get(0).getType());
        assertEquals(100, some.get(0).objectSize());
        assertTrue(some.get(0).committedTimestamp() > 0);
    }

    @Test
    void errorsOfAList() {
        node.commit(streamId, 0, 10);
        get(node.streams().trimStream(streamId, 1, 5));
        assertThrows(AutoMQException.class, () -> get(node.objects().getObjects(streamId, 0, 10, 10)));
        assertThrows(AutoMQException.class, () -> get(node.objects().getObjects(987_654, 0, 10, 10)));
    }

    @Test
    void aCompactionReplacesStreamSetObjects() {
        long old = node.commit(streamId, 0, 10);
        long older = node.commit(streamId, 10, 20);
        CommitStreamSetObjectRequest request = Node.upload(node.prepare(), streamId, 0, 20);
        request.setOrderId(old);
        request.setCompactedObjectIds(List.of(old, older));
        get(node.objects().commitStreamSetObject(request));

        List<S3ObjectMetadata> found = get(node.objects().getObjects(streamId, 0, 20, 10));
        assertEquals(List.of(request.getObjectId()), found.stream().map(S3ObjectMetadata::objectId).toList());
        assertEquals(old, get(node.objects().getServerObjects()).stream()
                .filter(object -> object.objectId() == request.getObjectId())
                .findFirst().orElseThrow().getOrderId());
        eventually(() -> !node.objects().isObjectExist(old) && !node.objects().isObjectExist(older));
        assertTrue(node.objects().isObjectExist(request.getObjectId()));

        CommitStreamSetObjectRequest late = Node.upload(node.prepare(), streamId, 0, 20);
        late.setCompactedObjectIds(List.of(old, older));
        assertThrows(
                CompactedObjectsNotFoundException.class, () -> get(node.objects().commitStreamSetObject(late)));
    }

    @Test
    void aForcedSplitLeavesStreamObjectsOnly() {
        long whole = node.commit(streamId, 0, 10);
        CommitStreamSetObjectRequest request = new CommitStreamSetObjectRequest();
        request.setObjectId(-1);
        request.setCompactedObjectIds(List.of(whole));
        var part = new com.automq.stream.s3.objects.StreamObject();
        part.setObjectId(node.prepare());
        part.setObjectSize(500);
        part.setStreamId(streamId);
        part.setStartOffset(0);
        part.setEndOffset(10);
        part.setAttributes(0);
        request.setStreamObjects(new ArrayList<>(List.of(part)));
        get(node.objects().commitStreamSetObject(request));

        List<S3ObjectMetadata> found = get(node.objects().getObjects(streamId, 0, 10, 10));
        assertEquals(List.of(S3ObjectType.STREAM), found.stream().map(S3ObjectMetadata::getType).toList());
        assertTrue(get(node.objects().getServerObjects()).stream()
                .noneMatch(object -> object.objectId() == whole));
    }

    @Test
    void streamObjectsAreMerged() {
        long left = node.commitStreamObject(streamId, 0, 10);
        long right = node.commitStreamObject(streamId, 10, 20);
        long merged = node.prepare();
        get(node.objects().compactStreamObject(
                compaction(merged, 0, List.of(left, right), CompactOperations.DELETE)));
        assertEquals(List.of(merged), idsFrom(0));
        eventually(() -> !node.objects().isObjectExist(left) && !node.objects().isObjectExist(right));
    }

    @Test
    void aCompositeKeepsTheDataOfItsSourcesUntilADeepDelete() {
        long left = node.commitStreamObject(streamId, 0, 10);
        long right = node.commitStreamObject(streamId, 10, 20);
        long composite = node.prepare();
        get(node.objects().compactStreamObject(
                compaction(composite, COMPOSITE, List.of(left, right), CompactOperations.KEEP_DATA)));
        S3ObjectMetadata found = get(node.objects().getObjects(streamId, 0, 20, 10)).get(0);
        assertEquals(composite, found.objectId());
        assertEquals(COMPOSITE, found.attributes());
        eventually(() -> !node.objects().isObjectExist(left) && !node.objects().isObjectExist(right));

        get(node.streams().trimStream(streamId, 1, 20));
        get(node.objects().compactStreamObject(
                compaction(-1, 0, List.of(composite), CompactOperations.DEEP_DELETE)));
        assertTrue(get(node.objects().getStreamObjects(streamId, 0, 20, 10)).isEmpty());
        eventually(() -> !node.objects().isObjectExist(composite));
    }

    @Test
    void errorsOfACompactionOfStreamObjects() {
        long source = node.commitStreamObject(streamId, 0, 20);
        assertThrows(CompactedObjectsNotFoundException.class, () -> get(node.objects().compactStreamObject(
                compaction(node.prepare(), 0, List.of(987_654_321L), CompactOperations.DELETE))));
        long prepared = node.prepare();
        assertThrows(ObjectNotCommittedException.class, () -> get(node.objects().compactStreamObject(
                compaction(prepared, 0, List.of(prepared), CompactOperations.DELETE))));

        get(node.streams().closeStream(streamId, 1));
        get(node.streams().openStream(streamId, 2, Map.of()));
        assertThrows(StreamFencedException.class, () -> get(node.objects().compactStreamObject(
                compaction(node.prepare(), 0, List.of(source), CompactOperations.DELETE))));
    }

    private CompactStreamObjectRequest compaction(
            long objectId, int attributes, List<Long> sources, CompactOperations operation) {
        List<CompactOperations> operations = sources.stream().map(source -> operation).toList();
        return new CompactStreamObjectRequest(objectId, 200, streamId, 1, 0, 20, sources, operations, attributes);
    }

    private List<Long> idsFrom(long offset) {
        return get(node.objects().getObjects(streamId, offset, -1, 10)).stream()
                .map(S3ObjectMetadata::objectId)
                .toList();
    }

    private static void eventually(BooleanSupplier condition) {
        get(Calls.poll(() -> CompletableFuture.completedFuture(condition.getAsBoolean()), isTrue -> isTrue));
    }
}
