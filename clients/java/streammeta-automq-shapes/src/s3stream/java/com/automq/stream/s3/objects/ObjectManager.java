package com.automq.stream.s3.objects;

import com.automq.stream.s3.metadata.S3ObjectMetadata;
import java.util.List;
import java.util.concurrent.CompletableFuture;

/** Shape of the objects of a node. */
public interface ObjectManager {
    CompletableFuture<Long> prepareObject(int count, long ttl);

    CompletableFuture<CommitStreamSetObjectResponse> commitStreamSetObject(CommitStreamSetObjectRequest request);

    CompletableFuture<Void> compactStreamObject(CompactStreamObjectRequest request);

    CompletableFuture<List<S3ObjectMetadata>> getObjects(long streamId, long startOffset, long endOffset, int limit);

    boolean isObjectExist(long objectId);

    CompletableFuture<List<S3ObjectMetadata>> getServerObjects();

    CompletableFuture<List<S3ObjectMetadata>> getStreamObjects(
            long streamId, long startOffset, long endOffset, int limit);

    CompletableFuture<Integer> getObjectsCount();

    void setCommitStreamSetObjectHook(CommitStreamSetObjectHook hook);
}
