package io.streammeta.client;

import io.streammeta.client.errors.ClientClosedException;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.DescribeClusterRequest;
import io.streammeta.v1.GetNextNodeIdRequest;
import java.time.Duration;
import java.util.Collection;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Objects;
import java.util.concurrent.CancellationException;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;

/**
 * Client of the controllers: finds the leader among them, retries safely and fails at the deadline.
 *
 * <p>All methods may be called from any thread, and their parts too. Futures complete on threads of the client, which
 * must not be blocked for long. They fail with a {@link io.streammeta.client.errors.StreammetaException}. With
 * {@link #await} a caller that has a thread of its own waits for one.
 *
 * <pre>{@code
 * try (StreammetaClient client = StreammetaClient.builder().endpoints("127.0.0.1:9091").build()) {
 *     KeyValues keys = client.keyValues("example");
 *     long version = StreammetaClient.await(keys.put("key", "value".getBytes(UTF_8)));
 * }
 * }</pre>
 */
public final class StreammetaClient implements AutoCloseable {
    private final Calls calls;

    private StreammetaClient(Builder builder) {
        calls = new Calls(
                List.copyOf(builder.endpoints),
                builder.tls,
                builder.deadline,
                builder.attemptTimeout,
                new ClientMetrics());
    }

    /** Returns a builder, which needs endpoints. */
    public static Builder builder() {
        return new Builder();
    }

    /** Returns the keys of a namespace, empty for the default one. */
    public KeyValues keyValues(String namespace) {
        return new KeyValues(calls, Objects.requireNonNull(namespace, "namespace"));
    }

    /** Returns the streams of all nodes, to be described. */
    public Streams streams() {
        return new Streams(calls);
    }

    /** Returns the objects of all nodes, to be described. */
    public StoredObjects objects() {
        return new StoredObjects(calls);
    }

    /** Returns the named objects of all nodes, to be described. */
    public NamedObjects namedObjects() {
        return new NamedObjects(calls);
    }

    /** Returns the nodes, to be described. */
    public Nodes nodes() {
        return new Nodes(calls);
    }

    /** Describes the cluster, as one controller knows it. The client learns the endpoints of all controllers. */
    public CompletableFuture<ClusterDescription> describeCluster() {
        return calls.call(Methods.DESCRIBE_CLUSTER, DescribeClusterRequest.getDefaultInstance())
                .thenApply(answer -> {
                    calls.learn(answer.getControllersList().stream()
                            .map(controller -> controller.getEndpoint())
                            .toList());
                    return ClusterDescription.of(answer);
                });
    }

    /**
     * Registers a process of a node and sends its heartbeats until the session is closed. Older processes of the node
     * are fenced. Fails with {@link io.streammeta.client.errors.NodeEpochExpiredException} when a newer process, or
     * another one with this epoch, has registered.
     */
    public CompletableFuture<BrokerSession> openSession(NodeIdentity node, SessionOptions options) {
        return BrokerSession.open(calls, node, options);
    }

    /**
     * Watches the metadata. The future completes when the watch has begun, so that state which is read afterwards has
     * all earlier changes.
     */
    public CompletableFuture<Watch> watch(WatchSelection selection, WatchListener listener) {
        return Watch.begin(calls, selection, listener);
    }

    /** Follows the keys of a namespace with a prefix. */
    public KeyFollower followKeys(String namespace, String prefix, KeyListener listener) {
        return KeyFollower.begin(calls, namespace, prefix, listener);
    }

    /** Returns a node id that no node has, 1000 or more. */
    public CompletableFuture<Integer> nextNodeId() {
        return calls.call(Methods.GET_NEXT_NODE_ID, GetNextNodeIdRequest.getDefaultInstance())
                .thenApply(answer -> answer.getNodeId());
    }

    /** Returns the counters of this client. */
    public ClientMetrics metrics() {
        return calls.metrics();
    }

    /** Closes all connections. Waiting and later calls fail with {@link ClientClosedException}. */
    @Override
    public void close() {
        calls.close();
    }

    /**
     * Waits for a future, and returns its value or throws its exception. An interrupted wait ends with
     * {@link CancellationException}, cancels the future and keeps the thread's interrupt status.
     */
    public static <T> T await(CompletableFuture<T> future) {
        try {
            return future.get();
        } catch (ExecutionException error) {
            if (error.getCause() instanceof RuntimeException cause) {
                throw cause;
            }
            throw new CompletionException(error.getCause());
        } catch (InterruptedException error) {
            future.cancel(true);
            Thread.currentThread().interrupt();
            throw new CancellationException("the thread was interrupted while it waited");
        }
    }

    /** Returns the exception of a call from the one that a stage of a future received, which may wrap it. */
    public static Throwable cause(Throwable error) {
        return error instanceof CompletionException && error.getCause() != null ? error.getCause() : error;
    }

    /** Settings of a client. */
    public static final class Builder {
        private final Collection<String> endpoints = new LinkedHashSet<>();
        private TlsFiles tls;
        private Duration deadline = Duration.ofSeconds(30);
        private Duration attemptTimeout = Duration.ofSeconds(2);

        private Builder() {}

        /** Adds controllers, each as HOST:PORT. One is enough, more are better while some do not run. */
        public Builder endpoints(String... endpoints) {
            return endpoints(List.of(endpoints));
        }

        /** Adds controllers, each as HOST:PORT. */
        public Builder endpoints(Collection<String> endpoints) {
            for (String endpoint : endpoints) {
                if (!endpoint.matches(".+:[0-9]{1,5}")) {
                    throw new IllegalArgumentException("endpoint is '" + endpoint + "', expected HOST:PORT");
                }
                this.endpoints.add(endpoint);
            }
            return this;
        }

        /** Encrypts connections, and authenticates both sides by certificates. */
        public Builder tls(TlsFiles files) {
            this.tls = Objects.requireNonNull(files, "files");
            return this;
        }

        /** Sets the time of a whole call, with all its attempts. The default is 30 seconds. */
        public Builder deadline(Duration deadline) {
            this.deadline = positive("deadline", deadline);
            return this;
        }

        /** Sets the time of one attempt, after which another controller is asked. The default is 2 seconds. */
        public Builder attemptTimeout(Duration timeout) {
            this.attemptTimeout = positive("attemptTimeout", timeout);
            return this;
        }

        /** Returns a client, which connects on its first call. Reads the files of TLS. */
        public StreammetaClient build() {
            if (endpoints.isEmpty()) {
                throw new IllegalArgumentException("there are no endpoints, expected one or more HOST:PORT");
            }
            return new StreammetaClient(this);
        }

        private static Duration positive(String name, Duration value) {
            if (value.isNegative() || value.isZero()) {
                throw new IllegalArgumentException(name + " is " + value + ", expected a positive time");
            }
            return value;
        }
    }
}
