package io.streammeta.rocketmq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.TlsFiles;
import io.streammeta.client.errors.PermissionDeniedException;
import io.streammeta.testkit.Controllers;
import java.nio.ByteBuffer;
import java.util.List;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.MessageStoreExecutor;
import org.apache.rocketmq.tieredstore.common.FileSegmentType;
import org.apache.rocketmq.tieredstore.metadata.entity.FileSegmentMetadata;
import org.apache.rocketmq.tieredstore.stream.FileSegmentInputStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

/** A tier over TLS: a broker's certificate allows everything that the plug-in does, for its own node alone. */
class TierTlsTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.overTls();

    private static final String PATH = "broker/orders/0";

    @Test
    void aBrokersCertificateIsEnough() {
        MessageStoreExecutor executor = new MessageStoreExecutor();
        try (Tier tier = open(1)) {
            StreammetaMetadataStore metadata = new StreammetaMetadataStore(tier);
            metadata.addTopic("orders", -1);
            metadata.updateFileSegment(new FileSegmentMetadata(PATH, 0, FileSegmentType.COMMIT_LOG.getCode()));
            var segment = new StreammetaFileSegment(
                    tier, new MessageStoreConfig(), FileSegmentType.COMMIT_LOG, PATH, 0, executor);
            ByteBuffer bytes = ByteBuffer.wrap(new byte[] {1, 2, 3});
            var stream = new FileSegmentInputStream(FileSegmentType.COMMIT_LOG, List.of(bytes), 3);
            assertTrue(segment.commit0(stream, 0, 3, true).join());
            assertEquals(bytes, segment.read0(0, 3).join());
            segment.destroyFile();
            metadata.destroy();
        } finally {
            executor.shutdown();
        }
    }

    @Test
    void anotherNodesCertificateIsNot() {
        assertThrows(PermissionDeniedException.class, () -> open(2));
    }

    private static Tier open(int nodeId) {
        TlsFiles files = new TlsFiles(
                CONTROLLERS.certificate("ca.pem"),
                CONTROLLERS.certificate("broker-1.pem"),
                CONTROLLERS.certificate("broker-1.key"));
        return Tier.open(
                new TierSettings(CONTROLLERS.endpoints(), CONTROLLERS.bucket(), nodeId, files), "cluster", "broker");
    }
}
