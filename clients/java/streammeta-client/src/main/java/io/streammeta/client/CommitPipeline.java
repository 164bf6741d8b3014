package io.streammeta.client;

import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.CommitStream;
import java.util.concurrent.CompletableFuture;

/**
 * Commits of one node, decided in the order of submission. It batches what arrives while others are in flight, and sends
 * unanswered commits again, in order, to the next leader.
 *
 * <p>The caller bounds what it has in flight: the pipeline keeps every commit until its outcome.
 */
public final class CommitPipeline {
    private final CommitStream stream;
    private final Caller caller;

    CommitPipeline(Calls calls, NodeIdentity node) {
        stream = new CommitStream(calls);
        caller = new Caller(node, null);
    }

    /**
     * Submits a commit, and returns the future of its verdict. It fails with
     * {@link io.streammeta.client.errors.ControllerUnavailableException} when the client's deadline passes, and with a
     * {@link io.streammeta.client.errors.RejectedException} when the controllers reject it with a status.
     */
    public CompletableFuture<CommitVerdict> submit(Commit commit) {
        return stream.submit(commit.toWire(caller), commit.rows()).thenApply(CommitVerdict::of);
    }

    void close() {
        stream.close();
    }
}
