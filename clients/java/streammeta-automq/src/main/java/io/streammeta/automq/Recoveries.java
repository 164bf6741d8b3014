package io.streammeta.automq;

import com.automq.stream.s3.failover.FailoverRequest;
import com.automq.stream.s3.failover.FailoverResponse;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.Recovery;
import io.streammeta.client.SessionListener;
import java.util.List;
import java.util.Set;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.Function;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Recoveries that the controllers assign to this node: each node is recovered once at a time. A recovery that failed is
 * tried again with a later heartbeat, as long as the controllers assign it.
 */
public class Recoveries implements SessionListener {
    private static final Logger LOG = LoggerFactory.getLogger(Recoveries.class);

    private final Function<FailoverRequest, CompletableFuture<FailoverResponse>> failover;
    private final Set<NodeIdentity> running = ConcurrentHashMap.newKeySet();

    /** Recovers nodes by a function, such as {@code new Failover(...)::failover}. */
    public Recoveries(Function<FailoverRequest, CompletableFuture<FailoverResponse>> failover) {
        this.failover = failover;
    }

    @Override
    public void onAssigned(List<Recovery> recoveries, List<NodeIdentity> compactions) {
        recoveries.forEach(this::recover);
    }

    private void recover(Recovery recovery) {
        NodeIdentity node = recovery.node();
        if (!running.add(node)) {
            return;
        }
        LOG.info("node {} at epoch {} is recovered from {}", node.nodeId(), node.nodeEpoch(), recovery.walConfig());
        FailoverRequest request = new FailoverRequest();
        request.setNodeId(node.nodeId());
        request.setNodeEpoch(node.nodeEpoch());
        request.setKraftWalConfigs(recovery.walConfig());
        started(request).whenComplete((response, error) -> {
            running.remove(node);
            if (error == null) {
                LOG.info("node {} at epoch {} is recovered", node.nodeId(), node.nodeEpoch());
            } else {
                LOG.error("the recovery of node {} failed, a later heartbeat repeats it", node.nodeId(), error);
            }
        });
    }

    private CompletableFuture<FailoverResponse> started(FailoverRequest request) {
        try {
            return failover.apply(request);
        } catch (RuntimeException error) {
            return CompletableFuture.failedFuture(error);
        }
    }
}
