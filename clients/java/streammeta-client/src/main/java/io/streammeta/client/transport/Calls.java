package io.streammeta.client.transport;

import com.google.protobuf.Descriptors.FieldDescriptor;
import com.google.protobuf.Message;
import io.grpc.CallOptions;
import io.grpc.ClientCall;
import io.grpc.ManagedChannel;
import io.grpc.MethodDescriptor.MethodType;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.StreamObserver;
import io.streammeta.client.ClientMetrics;
import io.streammeta.client.TlsFiles;
import io.streammeta.client.errors.ClientClosedException;
import io.streammeta.client.errors.ControllerUnavailableException;
import io.streammeta.client.errors.StreammetaException;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.Executors;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.ScheduledThreadPoolExecutor;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;

/**
 * Calls of the controllers: each is sent until a controller answers it, or until its deadline.
 *
 * <p>Every call of the contract is idempotent by request id, object id or epoch, so a request without an answer is sent
 * again, whether it took effect or not. A rejected request is not.
 */
public final class Calls implements AutoCloseable {
    private final Duration deadline;
    private final Duration attemptTimeout;
    private final ClientMetrics metrics;
    private final ScheduledExecutorService timer;
    private final Channels channels;
    private final LeaderRouter router;
    private final Set<Attempts<?, ?>> open = ConcurrentHashMap.newKeySet();
    private volatile boolean isClosed;

    /**
     * Creates connections when they are needed.
     *
     * @param tls the certificate and its CA, null for plain text
     * @param deadline the time of a whole call
     * @param attemptTimeout the time of one attempt
     */
    public Calls(
            List<String> endpoints, TlsFiles tls, Duration deadline, Duration attemptTimeout, ClientMetrics metrics) {
        this.deadline = deadline;
        this.attemptTimeout = attemptTimeout;
        this.metrics = metrics;
        var timer = new ScheduledThreadPoolExecutor(1, task -> {
            Thread thread = Executors.defaultThreadFactory().newThread(task);
            thread.setName("streammeta-timer");
            thread.setDaemon(true);
            return thread;
        });
        timer.setRemoveOnCancelPolicy(true);
        this.timer = timer;
        this.channels = new Channels(tls, timer);
        this.router = new LeaderRouter(
                endpoints, ThreadLocalRandom.current(), System::nanoTime, metrics::countLeaderChange);
    }

    /** Sends a request with the client's deadline. */
    public <Q extends Message, A extends Message> CompletableFuture<A> call(Method<Q, A> method, Q request) {
        return call(method, request, deadline);
    }

    /** Sends a request until a controller answers it. An empty {@code request_id} is filled in, once for all attempts. */
    public <Q extends Message, A extends Message> CompletableFuture<A> call(
            Method<Q, A> method, Q request, Duration deadline) {
        Attempts<Q, A> attempts = new Attempts<>(method, withRequestId(request), deadline);
        attempts.start();
        return attempts.result;
    }

    /** Opens a stream of messages to one controller. */
    <Q extends Message, A extends Message> ClientCall<Q, A> open(
            Method<Q, A> method, MethodType type, String endpoint) {
        ManagedChannel channel = channels.get(endpoint);
        return channel.newCall(method.descriptor(type), CallOptions.DEFAULT);
    }

    /** Makes a new connection for the next attempt if this one has no answer because of its connection. */
    void dropBroken(String endpoint, Failure failure) {
        if (failure.reason().isEmpty()) {
            channels.dropBroken(endpoint);
        }
    }

    LeaderRouter router() {
        return router;
    }

    /** Returns the scheduler of waits. Its tasks must not block. */
    public ScheduledExecutorService timer() {
        return timer;
    }

    /** Returns the counters. */
    public ClientMetrics metrics() {
        return metrics;
    }

    /** Returns the deadline of a call without its own. */
    public Duration deadline() {
        return deadline;
    }

    Duration attemptTimeout() {
        return attemptTimeout;
    }

    /** Returns whether the client is closed. */
    public boolean isClosed() {
        return isClosed;
    }

    /** Adds controllers to those that are asked. */
    public void learn(List<String> endpoints) {
        router.learn(endpoints);
    }

    /** Returns the endpoint of the presumed leader. */
    public Optional<String> leader() {
        return router.leader();
    }

    @Override
    public void close() {
        isClosed = true;
        channels.close();
        timer.shutdownNow();
        open.forEach(Attempts::failClosed);
    }

    @SuppressWarnings("unchecked")
    private static <Q extends Message> Q withRequestId(Q request) {
        FieldDescriptor field = request.getDescriptorForType().findFieldByName("request_id");
        if (field == null || !((String) request.getField(field)).isEmpty()) {
            return request;
        }
        return (Q) request.toBuilder().setField(field, UUID.randomUUID().toString()).build();
    }

    /** Attempts of one call. */
    private final class Attempts<Q extends Message, A extends Message> {
        private final Method<Q, A> method;
        private final Q request;
        private final Duration deadline;
        private final long endsAt;
        private final LeaderSearch search = new LeaderSearch(router);
        private final CompletableFuture<A> result = new CompletableFuture<>();
        private ClientCall<Q, A> current;

        Attempts(Method<Q, A> method, Q request, Duration deadline) {
            this.method = method;
            this.request = request;
            this.deadline = deadline;
            this.endsAt = System.nanoTime() + deadline.toNanos();
        }

        void start() {
            metrics.countCall();
            open.add(this);
            result.whenComplete((answer, error) -> {
                open.remove(this);
                ClientCall<Q, A> call = current;
                if (result.isCancelled() && call != null) {
                    call.cancel("the caller cancelled the call", null);
                }
            });
            attempt();
        }

        private void attempt() {
            if (result.isDone()) {
                return;
            }
            long left = endsAt - System.nanoTime();
            if (left <= 0) {
                fail(unavailable());
                return;
            }
            long timeout = Math.min(left, attemptTimeout.toNanos());
            long began = System.nanoTime();
            ManagedChannel channel;
            try {
                channel = channels.get(search.endpoint());
            } catch (ClientClosedException closed) {
                fail(closed);
                return;
            }
            CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(timeout, TimeUnit.NANOSECONDS);
            current = channel.newCall(method.descriptor(MethodType.UNARY), options);
            ClientCalls.asyncUnaryCall(current, request, new StreamObserver<A>() {
                @Override
                public void onNext(A answer) {
                    if (method.leaderOnly()) {
                        search.recordAnswer();
                    }
                    result.complete(answer);
                }

                @Override
                public void onError(Throwable error) {
                    onFailure(Failure.of(error), Duration.ofNanos(System.nanoTime() - began));
                }

                @Override
                public void onCompleted() {}
            });
        }

        private void onFailure(Failure failure, Duration waited) {
            if (result.isDone()) {
                return;
            }
            if (isClosed) {
                failClosed();
                return;
            }
            boolean ranOut = failure.code() == Status.Code.DEADLINE_EXCEEDED && System.nanoTime() - endsAt >= 0;
            if (ranOut) {
                // The attempt was shorter than others, so it says less about the endpoint.
                router.recordTimeout(search.endpoint(), waited);
                fail(unavailable());
                return;
            }
            dropBroken(search.endpoint(), failure);
            Optional<Duration> wait = search.recordFailure(failure);
            if (wait.isEmpty()) {
                fail(failure.rejection(method.name()));
                return;
            }
            failure.kind().ifPresent(metrics::countFailure);
            if (!schedule(wait.get(), this::attempt)) {
                failClosed();
            }
        }

        private void failClosed() {
            fail(new ClientClosedException(method.name()));
        }

        private StreammetaException unavailable() {
            return new ControllerUnavailableException(
                    method.name(), deadline, search.tried(), search.refusal(), method.isRead());
        }

        private void fail(StreammetaException error) {
            metrics.countError();
            result.completeExceptionally(error);
        }
    }

    /** Runs a task after a wait. Returns whether it will run: it does not after {@code close}. */
    boolean schedule(Duration wait, Runnable task) {
        try {
            timer.schedule(task, wait.toNanos(), TimeUnit.NANOSECONDS);
            return true;
        } catch (RejectedExecutionException closed) {
            return false;
        }
    }
}
