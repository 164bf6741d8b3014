package kafka.log.streamaspect.client.streammeta;

import com.automq.stream.api.Client;
import com.automq.stream.s3.Config;
import io.streammeta.automq.ElasticStreamEndpoint;
import io.streammeta.automq.broker.StreammetaS3Client;
import kafka.log.stream.s3.ConfigUtils;
import kafka.log.streamaspect.ClientWrapper;
import kafka.log.streamaspect.client.Context;

/** Factory that AutoMQ loads by name, for {@code elasticstream.endpoint=streammeta://HOST:PORT}. */
public final class ClientFactory {
    private ClientFactory() {}

    /** Returns the client of a broker. */
    public static Client get(Context context) {
        ElasticStreamEndpoint endpoint = ElasticStreamEndpoint.parse(context.config.elasticStreamEndpoint());
        Config config = ConfigUtils.to(context.config);
        config.version(() -> context.brokerServer.metadataCache().autoMQVersion().s3streamVersion());
        return new ClientWrapper(new StreammetaS3Client(context.brokerServer, config, endpoint));
    }
}
