package io.streammeta.automq.broker;

import com.automq.stream.Context;
import com.automq.stream.s3.Config;
import com.automq.stream.s3.metadata.ObjectUtils;
import com.automq.stream.s3.objects.ObjectManager;
import com.automq.stream.s3.streams.StreamManager;
import io.streammeta.automq.AutomqMetadata;
import io.streammeta.automq.ElasticStreamEndpoint;
import io.streammeta.automq.Recoveries;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.Recovery;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.errors.StreammetaException;
import java.util.List;
import kafka.log.stream.s3.DefaultS3Client;
import kafka.server.BrokerServer;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** AutoMQ's client of its broker, with streams, objects and keys at streammeta's controllers. */
public final class StreammetaS3Client extends DefaultS3Client {
    private static final Logger LOG = LoggerFactory.getLogger(StreammetaS3Client.class);

    private final ElasticStreamEndpoint endpoint;
    private volatile boolean isStarted;
    private AutomqMetadata metadata;

    /** Creates a client of a broker, which connects when it is started. */
    public StreammetaS3Client(BrokerServer brokerServer, Config config, ElasticStreamEndpoint endpoint) {
        super(brokerServer, config);
        this.endpoint = endpoint;
    }

    @Override
    public void start() {
        SessionOptions options =
                SessionOptions.DEFAULT.withWalConfig(config.walConfig()).withListener(new Assignments());
        metadata = AutomqMetadata.open(
                endpoint, new NodeIdentity(config.nodeId(), config.nodeEpoch()), options, new KafkaErrors());
        // The controllers delete objects under these keys.
        ObjectUtils.setNamespace(metadata.objectNamespace());
        super.start();
        kvClient = metadata.keys();
        Context.instance().kvClient(kvClient);
        isStarted = true;
    }

    @Override
    public void shutdown() {
        super.shutdown();
        metadata.close();
    }

    @Override
    protected StreamManager newStreamManager(int nodeId, long nodeEpoch, boolean failoverMode) {
        return failoverMode ? metadata.streamsOf(new NodeIdentity(nodeId, nodeEpoch)) : metadata.streams();
    }

    @Override
    protected ObjectManager newObjectManager(int nodeId, long nodeEpoch, boolean failoverMode) {
        return failoverMode ? metadata.objectsOf(new NodeIdentity(nodeId, nodeEpoch)) : metadata.objects();
    }

    private final class Assignments extends Recoveries {
        Assignments() {
            super(StreammetaS3Client.this::failover);
        }

        @Override
        public void onAssigned(List<Recovery> recoveries, List<NodeIdentity> compactions) {
            // A later heartbeat repeats what comes before the storage is ready.
            if (isStarted) {
                super.onAssigned(recoveries, compactions);
            }
        }

        @Override
        public void onTakenOver(StreammetaException error) {
            LOG.error("another process or node replaces this broker, it halts", error);
            Runtime.getRuntime().halt(1); // as AutoMQ does for a fenced node
        }
    }
}
