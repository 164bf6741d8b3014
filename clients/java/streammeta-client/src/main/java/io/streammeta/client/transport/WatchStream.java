package io.streammeta.client.transport;

import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import io.grpc.stub.ClientCallStreamObserver;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.ClientResponseObserver;
import io.streammeta.client.errors.ChangesLostException;
import io.streammeta.client.errors.ClientClosedException;
import io.streammeta.client.errors.ControllerUnavailableException;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.v1.WatchRequest;
import io.streammeta.v1.WatchResponse;
import java.time.Duration;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ThreadLocalRandom;
import java.util.function.Consumer;

/**
 * A watch that continues at another controller after a failure, with the change after the last received one. Each change
 * is passed on once and in order, and none is skipped.
 */
public final class WatchStream {
    private static final String METHOD = Methods.WATCH.name();
    /** Position of a watch from now on, before a controller has named it. */
    private static final long NOW = -1;
    /** A controller sends at least its position more often than that. */
    private static final Duration SILENCE = Duration.ofSeconds(5);

    private final Calls calls;
    private final WatchRequest request;
    private final Consumer<WatchResponse> onChange;
    private final Consumer<StreammetaException> onEnd;
    private final CompletableFuture<Void> begun = new CompletableFuture<>();

    // Why each controller does not serve the watch, since one has served it.
    private final Map<String, String> failed = new LinkedHashMap<>();
    private final Set<String> compacted = new HashSet<>();
    private final Set<String> tried = new HashSet<>();
    private long nextOffset;
    private long servedAt = System.nanoTime();
    private int rounds;
    private String endpoint;
    private Exchange exchange; // null between two controllers
    private boolean isClosed;

    /**
     * Creates a watch that is not started.
     *
     * @param request the selection, whose offset is replaced
     * @param fromOffset where it begins, empty for the changes from now on
     * @param onChange receives each response once, one at a time, also those without changes
     * @param onEnd receives the error by which the watch ends
     */
    public WatchStream(
            Calls calls,
            WatchRequest request,
            OptionalLong fromOffset,
            Consumer<WatchResponse> onChange,
            Consumer<StreammetaException> onEnd) {
        this.calls = calls;
        this.request = request;
        this.nextOffset = fromOffset.orElse(NOW);
        this.onChange = onChange;
        this.onEnd = onEnd;
        List<String> known = calls.router().known();
        this.endpoint = known.get(ThreadLocalRandom.current().nextInt(known.size()));
    }

    /** Begins. The future completes when the position is known: every later change is observed. */
    public CompletableFuture<Void> start() {
        if (nextOffset != NOW) {
            begun.complete(null);
        }
        connect();
        return begun;
    }

    private void connect() {
        StreammetaException closed = null;
        synchronized (this) {
            if (isClosed) {
                return;
            }
            try {
                exchange = new Exchange(endpoint);
                exchange.open();
            } catch (ClientClosedException error) {
                closed = error;
            }
        }
        if (closed != null) {
            end(closed);
        }
    }

    /** Returns the offset from which another watch would miss no change. */
    public synchronized long position() {
        return nextOffset;
    }

    /** Ends the watch. A change that is being processed is the last one. */
    public synchronized void close() {
        isClosed = true;
        if (exchange != null) {
            exchange.cancel();
            exchange = null;
        }
    }

    private void onResponse(Exchange from, WatchResponse response) {
        boolean isNew;
        synchronized (this) {
            if (from != exchange) {
                return;
            }
            if (response.getSnapshotRequired()) {
                failed.remove(endpoint);
                compacted.add(endpoint);
            } else {
                servedAt = System.nanoTime();
                rounds = 0;
                failed.clear();
                compacted.clear();
                tried.clear();
            }
            // A controller may repeat its position.
            isNew = !response.getSnapshotRequired() && response.getOffset() >= nextOffset;
            if (isNew) {
                nextOffset = response.getOffset() + 1;
            }
        }

        if (response.getSnapshotRequired()) {
            moveOn(from);
            return;
        }
        begun.complete(null);
        if (isNew) {
            onChange.accept(response);
        }
    }

    private void onFailure(Exchange from, Failure failure) {
        boolean isFinal;
        synchronized (this) {
            if (from != exchange) {
                return;
            }
            // Too many watches, or a slow one: another controller may have capacity.
            boolean isFull = failure.code() == Status.Code.RESOURCE_EXHAUSTED
                    && !failure.reason().isEmpty();
            isFinal = !isFull && failure.kind().isEmpty();
            calls.dropBroken(endpoint, failure);
            compacted.remove(endpoint);
            failed.put(endpoint, failure.text());
        }
        if (isFinal) {
            end(failure.rejection(METHOD));
        } else {
            moveOn(from);
        }
    }

    /** Continues at the next controller, after a wait if all were tried. */
    private void moveOn(Exchange from) {
        StreammetaException error = null;
        Duration wait = Duration.ZERO;
        synchronized (this) {
            if (from != exchange) {
                return;
            }
            exchange.cancel();
            exchange = null;
            calls.metrics().countWatchRestart();

            List<String> known = calls.router().known();
            Set<String> unable = new HashSet<>(compacted);
            unable.addAll(failed.keySet());
            if (!compacted.isEmpty() && unable.containsAll(known)) {
                error = new ChangesLostException(nextOffset);
            } else if (System.nanoTime() - servedAt > calls.deadline().toNanos()) {
                error = new ControllerUnavailableException(METHOD, calls.deadline(), failed, "", true);
            } else {
                tried.add(endpoint);
                if (tried.containsAll(known)) {
                    tried.clear();
                    wait = Backoff.ELECTION.after(rounds++, ThreadLocalRandom.current().nextDouble());
                }
                int at = known.indexOf(endpoint);
                endpoint = known.get((at + 1) % known.size());
            }
        }

        if (error != null) {
            end(error);
        } else if (!calls.schedule(wait, this::connect)) {
            end(new ClientClosedException(METHOD));
        }
    }

    /** Ends the watch with an error, of which the caller learns once. */
    public void end(StreammetaException error) {
        synchronized (this) {
            if (isClosed) {
                return;
            }
            close();
        }
        // A watch that has not begun has no listener yet.
        if (!begun.completeExceptionally(error)) {
            onEnd.accept(error);
        }
    }

    /** One call, to one controller. */
    private final class Exchange implements ClientResponseObserver<WatchRequest, WatchResponse> {
        private final String endpoint;
        private ClientCallStreamObserver<WatchRequest> call;
        private volatile long heardAt = System.nanoTime();
        private volatile boolean isBusy; // with the caller's own work

        Exchange(String endpoint) {
            this.endpoint = endpoint;
        }

        void open() {
            ClientCalls.asyncServerStreamingCall(
                    calls.open(Methods.WATCH, MethodType.SERVER_STREAMING, endpoint),
                    nextOffset == NOW
                            ? request.toBuilder().setFromNow(true).build()
                            : request.toBuilder().setFromOffset(nextOffset).build(),
                    this);
            calls.schedule(SILENCE, this::look);
        }

        void cancel() {
            call.cancel("the watch moves on", null);
        }

        /** Ends the call if the controller is silent. */
        private void look() {
            synchronized (WatchStream.this) {
                if (this != exchange) {
                    return;
                }
            }
            long left = heardAt + SILENCE.toNanos() - System.nanoTime();
            if (left > 0 || isBusy) {
                calls.schedule(left > 0 ? Duration.ofNanos(left) : SILENCE, this::look);
                return;
            }
            onFailure(this, Failure.of(Status.Code.DEADLINE_EXCEEDED, "no answer for " + SILENCE.toSeconds() + " s"));
        }

        @Override
        public void beforeStart(ClientCallStreamObserver<WatchRequest> call) {
            this.call = call;
        }

        @Override
        public void onNext(WatchResponse response) {
            isBusy = true;
            try {
                onResponse(this, response);
            } finally {
                heardAt = System.nanoTime();
                isBusy = false;
            }
        }

        @Override
        public void onError(Throwable error) {
            onFailure(this, Failure.of(error));
        }

        @Override
        public void onCompleted() {
            onFailure(this, Failure.of(Status.Code.UNAVAILABLE, "the watch ended"));
        }
    }
}
