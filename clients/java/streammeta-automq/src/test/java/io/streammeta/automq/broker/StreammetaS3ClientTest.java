package io.streammeta.automq.broker;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertSame;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.Context;
import com.automq.stream.s3.Config;
import com.automq.stream.s3.metadata.ObjectUtils;
import io.streammeta.automq.ElasticStreamEndpoint;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.ErrorCode;
import io.streammeta.testkit.Controllers;
import java.util.Map;
import kafka.server.BrokerServer;
import org.apache.kafka.common.errors.ApiException;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class StreammetaS3ClientTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    @Test
    void aBrokerRegistersAndFindsManagersAndKeys() throws Exception {
        ElasticStreamEndpoint endpoint =
                ElasticStreamEndpoint.parse("streammeta://" + String.join(",", CONTROLLERS.endpoints()));
        Config config = new Config().nodeId(61).nodeEpoch(1).walConfig("0@file:///wal");
        StreammetaS3Client broker = new StreammetaS3Client(new BrokerServer(), config, endpoint);
        broker.start();
        try (StreammetaClient client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            var node = client.nodes().describe(61).get().orElseThrow();
            assertEquals("0@file:///wal", node.walConfig());
            assertEquals(client.describeCluster().get().objectNamespace(), ObjectUtils.getNamespace());
            assertSame(broker.kvClient(), Context.instance().kvClient());

            long streamId = broker.newStreamManager(61, 1, false).createStream(Map.of()).get();
            assertTrue(client.streams().describe(streamId).get().isPresent());
            assertTrue(broker.newObjectManager(61, 1, false).prepareObject(1, 60_000).get() >= 0);
        } finally {
            broker.shutdown();
        }
    }

    @Test
    void theFactoriesHaveTheNamesThatAutomqLoads() throws Exception {
        Class.forName("kafka.log.streamaspect.client.streammeta.ClientFactory")
                .getDeclaredMethod("get", kafka.log.streamaspect.client.Context.class);
        Class.forName("kafka.controller.streamaspect.client.streammeta.StreamClientFactory")
                .getMethod("get", kafka.controller.streamaspect.client.Context.class);
    }

    @Test
    void aFencedNodeIsKnownToKafka() {
        KafkaErrors errors = new KafkaErrors();
        for (ErrorCode code : ErrorCode.values()) {
            if (!code.isSuccess()) {
                RuntimeException error = errors.translate(code.rejection("node 7"));
                boolean isKafkas = error instanceof ApiException;
                // Codes from 700 on, this one and the following, are not AutoMQ's.
                boolean isShared = code.compareTo(ErrorCode.OBJECT_CONTENT_MISMATCH) < 0;
                assertEquals(isKafkas, isShared && (code.name().startsWith("NODE_")
                        || code.name().startsWith("STREAM_") || code == ErrorCode.OFFSET_NOT_MATCHED), code.name());
                assertTrue(error.getMessage().contains("node 7"));
            }
        }
    }
}
