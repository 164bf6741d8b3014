package io.streammeta.rocketmq;

import io.streammeta.client.BrokerSession;
import io.streammeta.client.ClusterDescription;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionListener;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.NodeEpochExpiredException;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.store.ObjectStore;
import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.logging.org.slf4j.Logger;
import org.apache.rocketmq.logging.org.slf4j.LoggerFactory;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.util.MessageStoreUtil;

/** The tier of one broker: its registered process, its keys and its objects. One for all segments of a process. */
final class Tier implements AutoCloseable {
    private static final Logger LOG = LoggerFactory.getLogger(MessageStoreUtil.TIERED_STORE_LOGGER_NAME);
    /** The broker creates its metadata store and its segments by their names, each with the same configuration. */
    private static final Map<List<String>, Tier> OPEN = new ConcurrentHashMap<>();

    private static final String OWNER = "owner";

    /** The node whose processes write a tier. */
    static final class Owner {
        private int nodeId;

        /** Returns the node. */
        public int getNodeId() {
            return nodeId;
        }

        /** Sets the node. */
        public void setNodeId(int nodeId) {
            this.nodeId = nodeId;
        }
    }

    private final StreammetaClient client;
    private final BrokerSession session;
    private final ObjectStore store;
    private final TierKeys keys;
    private final SegmentObjects objects;

    private Tier(
            StreammetaClient client,
            BrokerSession session,
            ObjectStore store,
            String objectNamespace,
            String prefix) {
        this.client = client;
        this.session = session;
        this.store = store;
        this.keys = TierKeys.open(client, prefix, session.node().nodeEpoch());
        this.objects = new SegmentObjects(client, session, store, objectNamespace, keys, prefix);
    }

    /** Returns the tier of a broker, which the first call opens. */
    static Tier of(MessageStoreConfig config) {
        List<String> place =
                List.of(config.getTieredStoreFilePath(), config.getBrokerClusterName(), config.getBrokerName());
        return OPEN.computeIfAbsent(place, absent -> {
            Tier tier = open(
                    TierSettings.read(Path.of(config.getTieredStoreFilePath())),
                    config.getBrokerClusterName(),
                    config.getBrokerName());
            // The broker never closes its metadata store. Its last commits may follow, and need no heartbeat.
            Runtime.getRuntime().addShutdownHook(new Thread(tier.session::close, "streammeta-goodbye"));
            return tier;
        });
    }

    /** Registers a process of the broker, and takes the tier over from the former one. */
    static Tier open(TierSettings settings, String clusterName, String brokerName) {
        return open(settings, clusterName, brokerName, StreammetaClient.builder());
    }

    static Tier open(
            TierSettings settings, String clusterName, String brokerName, StreammetaClient.Builder builder) {
        String prefix = part("brokerClusterName", clusterName) + "/" + part("brokerName", brokerName) + "/";
        builder.endpoints(settings.controllers());
        if (settings.tls() != null) {
            builder.tls(settings.tls());
        }
        ObjectStore store = ObjectStore.open(settings.bucket());
        StreammetaClient client = builder.build();
        BrokerSession session = null;
        try {
            store.check();
            ClusterDescription cluster = StreammetaClient.await(client.describeCluster());
            session = register(client, settings.nodeId(), prefix);
            Tier tier = new Tier(client, session, store, cluster.objectNamespace(), prefix);
            requireOwner(tier.keys, settings.nodeId(), prefix);
            return tier;
        } catch (RuntimeException error) {
            if (session != null) {
                session.close();
            }
            client.close();
            store.close();
            throw error;
        }
    }

    /** Returns the keys. */
    TierKeys keys() {
        return keys;
    }

    /** Returns the objects. */
    SegmentObjects objects() {
        return objects;
    }

    /** Ends the process's session and its connections. */
    @Override
    public void close() {
        keys.close();
        session.close();
        client.close();
        store.close();
    }

    private static BrokerSession register(StreammetaClient client, int nodeId, String prefix) {
        SessionListener listener = new SessionListener() {
            @Override
            public void onTakenOver(StreammetaException error) {
                LOG.error("Tier '{}' belongs to a newer process of node {}, this one writes no more", prefix, nodeId, error);
            }
        };
        SessionOptions options = SessionOptions.DEFAULT.withListener(listener);
        while (true) {
            // The clock may be behind the one of the former process.
            long former = StreammetaClient.await(client.nodes().describe(nodeId))
                    .map(node -> node.identity().nodeEpoch())
                    .orElse(0L);
            NodeIdentity node = new NodeIdentity(nodeId, Math.max(former + 1, System.currentTimeMillis()));
            try {
                return StreammetaClient.await(client.openSession(node, options));
            } catch (NodeEpochExpiredException race) {
                LOG.warn("Node {} registers again, because another process of it registered meanwhile", nodeId, race);
            }
        }
    }

    private static void requireOwner(TierKeys keys, int nodeId, String prefix) {
        Owner own = new Owner();
        own.setNodeId(nodeId);
        int owner = keys.putIfAbsent(OWNER, own, Owner.class).getNodeId();
        if (owner != nodeId) {
            throw new IllegalStateException("tier '" + prefix + "' belongs to node " + owner + ", and this broker is node "
                    + nodeId + ". Load the plug-in in one process of a broker name, always with the same node.id");
        }
    }

    private static String part(String option, String name) {
        if (name.isEmpty() || name.contains("/")) {
            throw new IllegalArgumentException(option + " is '" + name + "', expected a name without a slash");
        }
        return name;
    }
}
