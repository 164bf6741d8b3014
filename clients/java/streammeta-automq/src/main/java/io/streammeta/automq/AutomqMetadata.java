package io.streammeta.automq;

import static io.streammeta.client.StreammetaClient.await;

import com.automq.stream.api.KVClient;
import com.automq.stream.s3.objects.ObjectManager;
import com.automq.stream.s3.streams.StreamManager;
import io.streammeta.client.BrokerSession;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreammetaClient;

/**
 * The metadata of an AutoMQ node at streammeta's controllers: a session with heartbeats, and the managers that s3stream
 * asks for.
 *
 * <p>The managers wait without a limit while no controller answers, as s3stream expects, and fail with
 * {@link io.streammeta.client.errors.ClientClosedException} once this is closed. Rejections are translated by
 * {@link HostErrors}.
 */
public final class AutomqMetadata implements AutoCloseable {
    /** The namespace of AutoMQ's keys. */
    public static final String KEY_NAMESPACE = "automq";

    private final StreammetaClient client;
    private final BrokerSession session;
    private final MetadataFeed feed;
    private final Calls calls;
    private final String objectNamespace;

    private AutomqMetadata(
            StreammetaClient client,
            BrokerSession session,
            MetadataFeed feed,
            Calls calls,
            String objectNamespace) {
        this.client = client;
        this.session = session;
        this.feed = feed;
        this.calls = calls;
        this.objectNamespace = objectNamespace;
    }

    /**
     * Registers a node and begins its heartbeats.
     *
     * @param options with AutoMQ's {@code s3.wal.path} as their walConfig, by which another node recovers this one, and
     *     {@link Recoveries} as their listener
     */
    public static AutomqMetadata open(
            ElasticStreamEndpoint endpoint, NodeIdentity node, SessionOptions options, HostErrors errors) {
        StreammetaClient client = endpoint.newClient();
        try {
            String objectNamespace = await(client.describeCluster()).objectNamespace();
            BrokerSession session = await(client.openSession(node, options));
            MetadataFeed feed = await(MetadataFeed.begin(client));
            return new AutomqMetadata(client, session, feed, new Calls(errors), objectNamespace);
        } catch (RuntimeException error) {
            client.close();
            throw error;
        }
    }

    /**
     * Returns the namespace of the keys of objects, for {@code ObjectUtils.setNamespace}. With another one the
     * controllers would delete nothing.
     */
    public String objectNamespace() {
        return objectNamespace;
    }

    /** Returns the streams of this node. */
    public StreamManager streams() {
        return new StreammetaStreamManager(session.streams(), client.streams(), feed.listeners(), calls);
    }

    /** Returns the objects of this node. */
    public ObjectManager objects() {
        return new StreammetaObjectManager(
                session.node().nodeId(), session.objects(), client.objects(), feed.destroyed(), calls);
    }

    /** Returns the streams of a node that this one recovers. */
    public StreamManager streamsOf(NodeIdentity recovered) {
        return new StreammetaStreamManager(
                session.streamsOf(recovered), client.streams(), feed.listeners(), calls);
    }

    /** Returns the objects of a node that this one recovers, prepared in the name of this node. */
    public ObjectManager objectsOf(NodeIdentity recovered) {
        return new StreammetaObjectManager(
                recovered.nodeId(), session.objectsOf(recovered), client.objects(), feed.destroyed(), calls);
    }

    /** Returns the keys that all AutoMQ nodes share. */
    public KVClient keys() {
        return new StreammetaKvClient(client.keyValues(KEY_NAMESPACE), KEY_NAMESPACE, calls);
    }

    /** Ends the heartbeats, announced, and all calls. */
    @Override
    public void close() {
        feed.close();
        session.close();
        client.close();
    }
}
