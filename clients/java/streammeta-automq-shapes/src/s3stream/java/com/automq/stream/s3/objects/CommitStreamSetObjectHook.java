package com.automq.stream.s3.objects;

import java.util.concurrent.CompletableFuture;

/** Shape of a callback after each commit. */
public interface CommitStreamSetObjectHook {
    CompletableFuture<Void> onCommitSuccess(CommitStreamSetObjectRequest request);
}
