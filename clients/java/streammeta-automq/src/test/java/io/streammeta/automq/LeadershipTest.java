package io.streammeta.automq;

import static io.streammeta.automq.Node.get;
import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.s3.metadata.S3ObjectMetadata;
import com.automq.stream.s3.metadata.StreamMetadata;
import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import java.util.List;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class LeadershipTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    @Test
    void commitsGoOnWhileTheLeaderIsKilled() throws Exception {
        try (Node node = Node.open(CONTROLLERS.endpoints(), 51);
                StreammetaClient client =
                        StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            long streamId = node.openedStream();
            BlockingQueue<StreamMetadata> heard = new LinkedBlockingQueue<>();
            node.streams().addMetadataListener(streamId, heard::add);
            for (int offset = 0; offset < 400; offset += 10) {
                if (offset == 100 || offset == 250) {
                    int leader = await(client.describeCluster()).leaderId().orElseThrow();
                    CONTROLLERS.kill(leader);
                    node.commit(streamId, offset, offset + 10);
                    CONTROLLERS.start(leader);
                } else {
                    node.commit(streamId, offset, offset + 10);
                }
            }

            List<S3ObjectMetadata> objects = get(node.objects().getObjects(streamId, 0, 400, 100));
            assertEquals(40, objects.size());
            for (int row = 0; row < 40; row++) {
                assertEquals(row * 10, objects.get(row).startOffset());
            }
            StreamMetadata last = heard.poll(10, TimeUnit.SECONDS);
            while (last != null && last.endOffset() < 400) {
                last = heard.poll(10, TimeUnit.SECONDS);
            }
            assertTrue(last != null, "the listener has not heard of the last commit");
        }
    }
}
