package io.streammeta.client;

import io.streammeta.client.errors.ControllerUnavailableException;
import io.streammeta.client.errors.NodeFencedException;
import io.streammeta.client.errors.NodeNotRegisteredException;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.client.errors.UnsupportedException;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.HeartbeatRequest;
import io.streammeta.v1.HeartbeatResponse;
import io.streammeta.v1.RegisterNodeRequest;
import io.streammeta.v1.UnregisterNodeRequest;
import java.time.Duration;
import java.util.List;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.RejectedExecutionException;
import java.util.concurrent.ThreadLocalRandom;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * One registered process of a node, and its heartbeats. {@link StreammetaClient#openSession} opens it.
 *
 * <p>A node that has sent a heartbeat is fenced after a silence of the session timeout, and other brokers recover its
 * open streams.
 */
public final class BrokerSession implements AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(BrokerSession.class);
    /** Random id of this process. It distinguishes two processes of a node with the same epoch. */
    private static final String PROCESS_ID = UUID.randomUUID().toString();

    private static final int HEARTBEATS_PER_SESSION = 4;
    private static final Duration FIRST_INTERVAL = Duration.ofSeconds(1);
    private static final Duration LAST_HEARTBEAT = Duration.ofSeconds(2);

    private final Calls calls;
    private final NodeIdentity node;
    private final SessionOptions options;
    private final CommitPipeline pipeline;
    private volatile Duration interval = FIRST_INTERVAL;
    private volatile boolean isStopped;

    private BrokerSession(Calls calls, NodeIdentity node, SessionOptions options) {
        this.calls = calls;
        this.node = node;
        this.options = options;
        this.pipeline = new CommitPipeline(calls, node);
    }

    static CompletableFuture<BrokerSession> open(Calls calls, NodeIdentity node, SessionOptions options) {
        BrokerSession session = new BrokerSession(calls, node, options);
        return session.register().thenApply(none -> {
            session.beat();
            return session;
        });
    }

    private CompletableFuture<Void> register() {
        RegisterNodeRequest request = RegisterNodeRequest.newBuilder()
                .setNode(node.toWire())
                .setWalConfig(options.walConfig())
                .addAllTags(Wire.tags(options.tags()))
                .setProcessId(PROCESS_ID)
                .build();
        return calls.call(Methods.REGISTER_NODE, request).thenAccept(answer -> {
            Wire.check(
                    answer.getError(),
                    "registration of node " + node.nodeId() + " at epoch " + node.nodeEpoch());
        });
    }

    /** Returns the node and the epoch of this process. */
    public NodeIdentity node() {
        return node;
    }

    /** Returns the streams that this node creates, opens and closes. */
    public NodeStreams streams() {
        return new NodeStreams(calls, new Caller(node, null));
    }

    /** Returns the objects that this node prepares and commits. */
    public NodeObjects objects() {
        return new NodeObjects(calls, new Caller(node, null));
    }

    /** Returns the streams of a node that this session recovers. */
    public NodeStreams streamsOf(NodeIdentity recovered) {
        return new NodeStreams(calls, new Caller(node, recovered));
    }

    /**
     * Returns the objects of a node that this session recovers or compacts. They are prepared in the session's own name
     * and committed in that of the node.
     */
    public NodeObjects objectsOf(NodeIdentity recovered) {
        return new NodeObjects(calls, new Caller(node, recovered));
    }

    /** Returns the named objects of the cluster, to be committed and deleted by this node. */
    public NodeNamedObjects namedObjects() {
        return new NodeNamedObjects(calls, node);
    }

    /** Returns the pipeline of commits of this node, which batches them. */
    public CommitPipeline pipeline() {
        return pipeline;
    }

    /**
     * Announces the wish to shut down. Returns whether the node has neither open streams nor pending uploads: if not, ask
     * again.
     */
    public CompletableFuture<Boolean> requestShutdown() {
        return heartbeat(message().setWantsShutdown(true).build(), calls.deadline())
                .thenApply(HeartbeatResponse::getMayShutdown);
    }

    /** Forgets the node, which has no open streams and pending uploads, and ends the heartbeats. */
    public CompletableFuture<Void> unregister() {
        isStopped = true;
        UnregisterNodeRequest request =
                UnregisterNodeRequest.newBuilder().setNode(node.toWire()).build();
        return calls.call(Methods.UNREGISTER_NODE, request)
                .thenAccept(answer -> Wire.check(answer.getError(), "node " + node.nodeId()));
    }

    /**
     * Waits for the submitted commits, and ends the heartbeats with one that announces an orderly end, so that the
     * silence of the node raises no alarm. The node stays registered.
     */
    @Override
    public void close() {
        pipeline.close();
        if (isStopped || calls.isClosed()) {
            return;
        }
        isStopped = true;
        try {
            heartbeat(message().setCloses(true).build(), LAST_HEARTBEAT)
                    .get(LAST_HEARTBEAT.toMillis(), TimeUnit.MILLISECONDS);
        } catch (ExecutionException | TimeoutException error) {
            // Costs an alarm, not the closing.
            LOG.info("the last heartbeat of node {} failed, an alarm may name it: {}", node.nodeId(), error.toString());
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    private HeartbeatRequest.Builder message() {
        return HeartbeatRequest.newBuilder()
                .setNode(node.toWire())
                .setSessionTimeoutMs(options.timeout().toMillis());
    }

    private CompletableFuture<HeartbeatResponse> heartbeat(HeartbeatRequest request, Duration deadline) {
        return calls.call(Methods.HEARTBEAT, request, deadline).thenApply(answer -> {
            Wire.check(answer.getError(), "heartbeat of node " + node.nodeId());
            return answer;
        });
    }

    private void beat() {
        if (isStopped || calls.isClosed()) {
            return;
        }
        heartbeat(message().build(), calls.deadline()).whenComplete((answer, error) -> {
            if (error == null) {
                onAnswer(answer);
            } else {
                onFailure(StreammetaClient.cause(error));
            }
            scheduleNext();
        });
    }

    private void onAnswer(HeartbeatResponse answer) {
        if (answer.getSessionTimeoutMs() > 0) {
            // The controllers may grant another timeout than requested.
            interval = Duration.ofMillis(answer.getSessionTimeoutMs() / HEARTBEATS_PER_SESSION);
        }
        List<Recovery> recoveries = answer.getRecoveriesList().stream()
                .map(recovery -> new Recovery(
                        new NodeIdentity(recovery.getNodeId(), recovery.getNodeEpoch()), recovery.getWalConfig()))
                .toList();
        List<NodeIdentity> compactions =
                answer.getCompactionsList().stream().map(NodeIdentity::of).toList();
        if (!recoveries.isEmpty() || !compactions.isEmpty()) {
            tell(() -> options.listener().onAssigned(recoveries, compactions));
        }
    }

    private void onFailure(Throwable error) {
        if (error instanceof NodeFencedException || error instanceof NodeNotRegisteredException) {
            LOG.warn("another process or node replaces node {}: {}", node.nodeId(), error.getMessage());
            isStopped = true;
            tell(() -> options.listener().onTakenOver((StreammetaException) error));
        } else if (error instanceof UnsupportedException) {
            isStopped = true; // the controllers have no sessions
        } else if (error instanceof ControllerUnavailableException || !calls.isClosed()) {
            LOG.warn("a heartbeat of node {} failed, the next one follows: {}", node.nodeId(), error.getMessage());
        }
    }

    private void tell(Runnable callback) {
        try {
            callback.run();
        } catch (RuntimeException error) {
            // Without heartbeats the node would be fenced.
            LOG.error("a session listener failed", error);
        }
    }

    private void scheduleNext() {
        // Jitter keeps the brokers of a restarted cluster from beating in step.
        double millis = interval.toMillis() * ThreadLocalRandom.current().nextDouble(0.9, 1.1);
        try {
            calls.timer().schedule(this::beat, (long) millis, TimeUnit.MILLISECONDS);
        } catch (RejectedExecutionException closed) {
            LOG.debug("the client of node {} is closed, its heartbeats end", node.nodeId());
        }
    }
}
