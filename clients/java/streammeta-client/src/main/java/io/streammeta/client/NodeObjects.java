package io.streammeta.client;

import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.PrepareObjectsRequest;
import java.time.Duration;
import java.util.concurrent.CompletableFuture;

/** Objects of a node: their preparation and commit. {@link CommitPipeline} commits many uploads. */
public final class NodeObjects {
    private final Calls calls;
    private final Caller caller;

    NodeObjects(Calls calls, Caller caller) {
        this.calls = calls;
        this.caller = caller;
    }

    /**
     * Issues consecutive object ids, 1 to 10000.
     *
     * @param timeToCommit the time in which they must be committed, 1 second to 7 days
     */
    public CompletableFuture<PreparedObjects> prepare(int count, Duration timeToCommit) {
        PrepareObjectsRequest request = PrepareObjectsRequest.newBuilder()
                // A node that is recovered is fenced: its recoverer prepares in its own name.
                .setNode(caller.self().toWire())
                .setCount(count)
                .setTtlMs(timeToCommit.toMillis())
                .build();
        return calls.call(Methods.PREPARE_OBJECTS, request).thenApply(answer -> {
            Wire.check(answer.getError(), "preparation of " + count + " objects");
            return new PreparedObjects(answer.getFirstObjectId(), count, answer.getDeadlineMs());
        });
    }

    /** Commits an upload, or the result of compacting stream set objects, and returns the verdict. */
    public CompletableFuture<CommitVerdict> commit(Commit commit) {
        return calls.call(Methods.COMMIT_STREAM_SET_OBJECT, commit.toWire(caller)).thenApply(CommitVerdict::of);
    }

    /** Commits the result of compacting stream objects, and returns the verdict. */
    public CompletableFuture<CommitVerdict> commit(StreamObjectCommit commit) {
        return calls.call(Methods.COMMIT_STREAM_OBJECT, commit.toWire(caller)).thenApply(CommitVerdict::of);
    }
}
