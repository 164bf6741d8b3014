package io.streammeta.client.transport;

import io.grpc.Status;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.ClientResponseObserver;
import io.streammeta.client.errors.ClientClosedException;
import io.streammeta.client.errors.ControllerUnavailableException;
import io.streammeta.client.errors.PermissionDeniedException;
import io.streammeta.client.errors.RejectedException;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.client.errors.UnsupportedException;
import io.streammeta.v1.CommitPipelineRequest;
import io.streammeta.v1.CommitPipelineResponse;
import io.streammeta.v1.CommitStreamSetObjectRequest;
import io.streammeta.v1.CommitStreamSetObjectResponse;
import io.streammeta.v1.ErrorCode;
import java.time.Duration;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/**
 * Commits in the order of submission: many in a message, several messages in flight, across changes of the leader.
 *
 * <p>Commits that arrive while messages are in flight share the next message. After a failure all unanswered messages
 * are sent again, in order: commits are idempotent by object id. Invariants, outside of the lock:
 *
 * <ul>
 *   <li>A commit without an outcome is in exactly one place: in a message in flight, or in the queue.
 *   <li>Messages in flight followed by the queue are in the order of submission, and are written in that order.
 *   <li>The first {@code written} messages in flight are written on the present call, and answered from the oldest on.
 * </ul>
 */
public final class CommitStream {
    private static final String METHOD = Methods.COMMIT_PIPELINE.name();
    private static final int MESSAGES_IN_FLIGHT = 4;
    private static final int COMMITS_MAX = 10_000;
    private static final int ROWS_MAX = 20_000;
    private static final int BYTES_MAX = 1 << 20;

    private final Calls calls;
    private final Deque<Pending> queue = new ArrayDeque<>();
    private final Deque<Message> inFlight = new ArrayDeque<>();
    private LeaderSearch search;
    private Exchange exchange; // null without a call
    private int written;
    private long sequence;
    private boolean isWaiting; // for the time of the next attempt
    private boolean isClosed;

    /** Connects on the first commit. */
    public CommitStream(Calls calls) {
        this.calls = calls;
        this.search = new LeaderSearch(calls.router());
    }

    /**
     * Submits a commit. The future of the answer fails when the client's deadline passes, and when the controllers
     * reject the commit with a status.
     *
     * @param rows the number of rows in the commit
     */
    public CompletableFuture<CommitStreamSetObjectResponse> submit(CommitStreamSetObjectRequest commit, int rows) {
        long now = System.nanoTime();
        Pending pending = new Pending(
                commit, rows, commit.getSerializedSize(), now, now + calls.deadline().toNanos());
        synchronized (this) {
            if (isClosed) {
                pending.done.completeExceptionally(new ClientClosedException(METHOD));
                return pending.done;
            }
            queue.add(pending);
        }
        pump();
        return pending.done;
    }

    /** Returns whether every submitted commit has an outcome. */
    public synchronized boolean isIdle() {
        return queue.isEmpty() && inFlight.isEmpty();
    }

    /** Accepts no more commits. Those without an outcome fail. */
    public void close() {
        List<Pending> open;
        synchronized (this) {
            isClosed = true;
            open = takeAll();
            disconnect("the pipeline is closed");
        }
        fail(open, new ClientClosedException(METHOD + ", whose unanswered commits may have been committed"));
    }

    // -- sending

    private void pump() {
        synchronized (this) {
            if (isWaiting || isClosed || (queue.isEmpty() && inFlight.isEmpty())) {
                return;
            }
            try {
                if (exchange == null) {
                    exchange = new Exchange();
                    exchange.open(search.endpoint());
                }
                sendMessages();
                return;
            } catch (ClientClosedException closed) {
                exchange = null;
            }
        }
        close(); // the client was closed before its pipeline
    }

    private void sendMessages() {
        while (written < MESSAGES_IN_FLIGHT) {
            Message message = written < inFlight.size() ? inFlightAt(written) : takeMessage();
            if (message == null) {
                return;
            }
            written++;
            exchange.send(message);
        }
    }

    private Message inFlightAt(int index) {
        return inFlight.stream().skip(index).findFirst().orElseThrow();
    }

    /** Moves commits from the queue to a new message in flight, null if there are none. */
    private Message takeMessage() {
        List<Pending> commits = new ArrayList<>();
        int rows = 0;
        int bytes = 0;
        while (!queue.isEmpty() && commits.size() < COMMITS_MAX) {
            Pending next = queue.peek();
            // A commit above the limits is sent alone, and the controller decides.
            if (!commits.isEmpty() && (rows + next.rows > ROWS_MAX || bytes + next.bytes > BYTES_MAX)) {
                break;
            }
            rows += next.rows;
            bytes += next.bytes;
            commits.add(queue.poll());
        }
        if (commits.isEmpty()) {
            return null;
        }
        Message message = new Message(++sequence, commits);
        inFlight.add(message);
        return message;
    }

    // -- answers and failures

    private void onAnswer(Exchange from, CommitPipelineResponse answer) {
        Message message;
        synchronized (this) {
            if (from != exchange) {
                return;
            }
            message = written == 0 ? null : inFlight.peek();
            if (message == null
                    || message.sequence != answer.getSequence()
                    || message.commits.size() != answer.getCommitsCount()) {
                message = null;
            } else {
                inFlight.poll();
                written--;
                search.recordAnswer();
                exchange.expectAnswer();
            }
        }

        if (message == null) {
            onFailure(from, Failure.of(Status.Code.UNAVAILABLE, "an answer does not match its message"));
            return;
        }
        for (int row = 0; row < message.commits.size(); row++) {
            settle(message.commits.get(row), answer.getCommits(row));
        }
        pump();
    }

    private void onFailure(Exchange from, Failure failure) {
        List<Pending> failed = List.of();
        StreammetaException error = null;
        boolean isAgain = true;
        synchronized (this) {
            if (from != exchange) {
                return;
            }
            disconnect("the call failed");
            calls.dropBroken(search.endpoint(), failure);
            Optional<Duration> wait = search.recordFailure(failure);
            if (wait.isEmpty()) {
                RejectedException rejection = failure.rejection(METHOD);
                failed = reject(rejection);
                error = rejection;
            } else {
                failure.kind().ifPresent(calls.metrics()::countFailure);
                error = new ControllerUnavailableException(
                        METHOD, calls.deadline(), search.tried(), search.refusal(), false);
                failed = takeExpired();
                if (queue.isEmpty() && inFlight.isEmpty()) {
                    search = new LeaderSearch(calls.router()); // the next commit starts a new search
                } else {
                    isWaiting = true;
                    isAgain = calls.schedule(wait.get(), this::resume);
                }
            }
        }

        fail(failed, error);
        if (isAgain) {
            pump();
        } else {
            close(); // the client is closed
        }
    }

    private void resume() {
        synchronized (this) {
            isWaiting = false;
        }
        pump();
    }

    private void disconnect(String reason) {
        if (exchange != null) {
            exchange.cancel(reason);
            exchange = null;
        }
        written = 0;
    }

    /** Returns the commits that fail because the oldest message was rejected, or splits it. */
    private List<Pending> reject(RejectedException rejection) {
        // These errors concern the caller, so every other commit would fail in the same way.
        if (rejection instanceof UnsupportedException || rejection instanceof PermissionDeniedException) {
            return takeAll();
        }
        Message message = inFlight.poll();
        if (message == null) {
            return List.of();
        }
        int size = message.commits.size();
        if (size == 1) {
            return message.commits;
        }
        // Bisection finds the bad commit with a logarithmic number of messages.
        inFlight.addFirst(new Message(++sequence, message.commits.subList(size / 2, size)));
        inFlight.addFirst(new Message(++sequence, message.commits.subList(0, size / 2)));
        return List.of();
    }

    private List<Pending> takeAll() {
        List<Pending> open = new ArrayList<>();
        inFlight.forEach(message -> open.addAll(message.commits));
        open.addAll(queue);
        inFlight.clear();
        queue.clear();
        return open;
    }

    /** Removes the commits that ran out of time, and those whose callers have cancelled them. */
    private List<Pending> takeExpired() {
        long now = System.nanoTime();
        List<Pending> expired = new ArrayList<>();
        List<Message> remaining = new ArrayList<>();
        for (Message message : inFlight) {
            List<Pending> open = new ArrayList<>();
            for (Pending pending : message.commits) {
                (pending.isOver(now) ? expired : open).add(pending);
            }
            if (!open.isEmpty()) {
                remaining.add(new Message(message.sequence, open));
            }
        }
        inFlight.clear();
        inFlight.addAll(remaining);
        queue.removeIf(pending -> pending.isOver(now) && expired.add(pending));
        return expired;
    }

    private void settle(Pending pending, CommitStreamSetObjectResponse answer) {
        boolean isAccepted = answer.getError() == ErrorCode.ERROR_CODE_NONE;
        calls.metrics().countCommit(isAccepted, System.nanoTime() - pending.submittedAt);
        pending.done.complete(answer);
    }

    private void fail(List<Pending> commits, StreammetaException error) {
        for (Pending pending : commits) {
            calls.metrics().countUnansweredCommit();
            pending.done.completeExceptionally(error);
        }
    }

    /** A commit whose caller waits for its outcome. */
    private static final class Pending {
        private final CommitStreamSetObjectRequest commit;
        private final int rows;
        private final int bytes;
        private final long submittedAt;
        private final long expiresAt;
        private final CompletableFuture<CommitStreamSetObjectResponse> done = new CompletableFuture<>();

        Pending(CommitStreamSetObjectRequest commit, int rows, int bytes, long submittedAt, long expiresAt) {
            this.commit = commit;
            this.rows = rows;
            this.bytes = bytes;
            this.submittedAt = submittedAt;
            this.expiresAt = expiresAt;
        }

        boolean isOver(long now) {
            return done.isDone() || now - expiresAt >= 0;
        }
    }

    /** Commits that are sent together. The sequence is echoed in the answer. */
    private record Message(long sequence, List<Pending> commits) {
        CommitPipelineRequest toWire() {
            CommitPipelineRequest.Builder request = CommitPipelineRequest.newBuilder().setSequence(sequence);
            commits.forEach(pending -> request.addCommits(pending.commit));
            return request.build();
        }
    }

    /** One call, to one controller. All but its callbacks run under the lock of the stream. */
    private final class Exchange implements ClientResponseObserver<CommitPipelineRequest, CommitPipelineResponse> {
        private ClientCallStreamObserver<CommitPipelineRequest> requests;
        private long answerDue; // of the oldest message in flight
        private boolean hasTimer;

        void open(String endpoint) {
            ClientCalls.asyncBidiStreamingCall(
                    calls.open(Methods.COMMIT_PIPELINE, MethodType.BIDI_STREAMING, endpoint), this);
        }

        void send(Message message) {
            if (written == 1) {
                expectAnswer();
            }
            requests.onNext(message.toWire());
        }

        void cancel(String reason) {
            requests.cancel(reason, null);
        }

        void expectAnswer() {
            answerDue = System.nanoTime() + calls.attemptTimeout().toNanos();
            if (!hasTimer && written > 0) {
                hasTimer = calls.schedule(calls.attemptTimeout(), this::look);
            }
        }

        /** Ends the call if an answer is late. */
        private void look() {
            synchronized (CommitStream.this) {
                hasTimer = false;
                if (this != exchange || written == 0) {
                    return;
                }
                long left = answerDue - System.nanoTime();
                if (left > 0) {
                    hasTimer = calls.schedule(Duration.ofNanos(left), this::look);
                    return;
                }
            }
            onFailure(this, Failure.of(Status.Code.DEADLINE_EXCEEDED, "no answer in the time of one attempt"));
        }

        @Override
        public void beforeStart(ClientCallStreamObserver<CommitPipelineRequest> requests) {
            this.requests = requests;
        }

        @Override
        public void onNext(CommitPipelineResponse answer) {
            onAnswer(this, answer);
        }

        @Override
        public void onError(Throwable error) {
            onFailure(this, Failure.of(error));
        }

        @Override
        public void onCompleted() {
            onFailure(this, Failure.of(Status.Code.UNAVAILABLE, "the stream of answers ended"));
        }
    }
}
