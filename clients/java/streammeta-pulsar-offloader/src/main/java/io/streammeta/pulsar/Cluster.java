package io.streammeta.pulsar;

import static io.streammeta.client.StreammetaClient.await;

import io.streammeta.client.BrokerSession;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionListener;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.store.ObjectKeys;
import io.streammeta.store.ObjectStore;
import java.util.OptionalInt;
import java.util.concurrent.Executor;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.atomic.AtomicInteger;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** Connections of a broker to the controllers and their bucket, shared by the offloaders with the same settings. */
final class Cluster implements AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(Cluster.class);
    private static final int READ_THREADS = 4;

    private final StreammetaClient client;
    private final ObjectStore store;
    private final ExecutorService readers;
    private OptionalInt nodeId;
    private BrokerSession session;
    private volatile String namespace;

    Cluster(OffloaderSettings settings) {
        StreammetaClient.Builder builder = StreammetaClient.builder().endpoints(settings.endpoints());
        settings.tls().ifPresent(builder::tls);
        store = ObjectStore.open(settings.bucket());
        client = builder.build();
        nodeId = settings.nodeId();

        AtomicInteger threads = new AtomicInteger();
        readers = Executors.newFixedThreadPool(READ_THREADS, task -> {
            Thread thread = new Thread(task, "streammeta-offload-read-" + threads.incrementAndGet());
            thread.setDaemon(true);
            return thread;
        });
    }

    StreammetaClient client() {
        return client;
    }

    ObjectStore store() {
        return store;
    }

    /** Returns the threads that read copies, so that a long offload delays no consumer. */
    Executor readers() {
        return readers;
    }

    /** Returns the key in the bucket of an object's bytes. Blocks. */
    String keyOf(long objectId) {
        if (namespace == null) {
            namespace = await(client.describeCluster()).objectNamespace();
        }
        return ObjectKeys.of(namespace, objectId);
    }

    /** Returns this broker's session, which is opened when it is needed first, or was lost. Blocks. */
    synchronized BrokerSession session() {
        if (session == null) {
            if (nodeId.isEmpty()) {
                nodeId = OptionalInt.of(await(client.nextNodeId()));
            }
            NodeIdentity node = new NodeIdentity(nodeId.getAsInt(), System.currentTimeMillis());
            SessionListener listener = new SessionListener() {
                @Override
                public void onTakenOver(StreammetaException error) {
                    forget(node);
                }
            };
            session = await(client.openSession(node, SessionOptions.DEFAULT.withListener(listener)));
        }
        return session;
    }

    private synchronized void forget(NodeIdentity node) {
        if (session != null && session.node().equals(node)) {
            session = null;
        }
    }

    @Override
    public synchronized void close() {
        readers.shutdown();
        if (session != null) {
            try {
                await(session.unregister());
            } catch (StreammetaException error) {
                // An offload in progress holds prepared objects: they expire, and the node counts as dead.
                LOG.info("node {} stays registered, unregister it later: {}", session.node().nodeId(), error.getMessage());
                session.close();
            }
            session = null;
        }
        client.close();
        store.close();
    }
}
