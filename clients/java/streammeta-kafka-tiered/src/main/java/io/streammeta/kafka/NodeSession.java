package io.streammeta.kafka;

import static io.streammeta.client.StreammetaClient.await;

import io.streammeta.client.BrokerSession;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.NodeEpochExpiredException;
import io.streammeta.client.errors.NodeFencedException;
import io.streammeta.client.errors.NodeNotRegisteredException;
import java.util.concurrent.CompletableFuture;
import java.util.function.Function;

/**
 * The session of the node for which a plug-in writes. It is opened by the first call, and again after the node was
 * fenced: named objects need no recovery.
 */
final class NodeSession implements AutoCloseable {
    private final StreammetaClient client;
    private final int nodeId;

    private BrokerSession session; // null before the first call, and after the node was fenced

    NodeSession(StreammetaClient client, int nodeId) {
        this.client = client;
        this.nodeId = nodeId;
    }

    /** Makes a call, a second time if the node was fenced, and waits for it. */
    <T> T call(Function<BrokerSession, CompletableFuture<T>> call) {
        BrokerSession present = open();
        try {
            return await(call.apply(present));
        } catch (NodeEpochExpiredException replaced) {
            throw replaced; // a newer process of the node writes now
        } catch (NodeFencedException | NodeNotRegisteredException fenced) {
            drop(present);
            return await(call.apply(open()));
        }
    }

    private synchronized BrokerSession open() {
        if (session == null) {
            // A clock that went back must not make the epoch smaller.
            long last = await(client.nodes().describe(nodeId)).map(node -> node.identity().nodeEpoch()).orElse(0L);
            var node = new NodeIdentity(nodeId, Math.max(last + 1, System.currentTimeMillis()));
            session = await(client.openSession(node, SessionOptions.DEFAULT));
        }
        return session;
    }

    private synchronized void drop(BrokerSession fenced) {
        if (session == fenced) {
            session = null;
            fenced.close();
        }
    }

    @Override
    public synchronized void close() {
        if (session != null) {
            session.close();
            session = null;
        }
    }
}
