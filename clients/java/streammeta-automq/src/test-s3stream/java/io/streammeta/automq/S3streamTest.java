package io.streammeta.automq;

import static io.streammeta.automq.Node.get;
import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.api.AppendResult;
import com.automq.stream.api.Stream;
import com.automq.stream.s3.compact.StreamObjectCompactor.CompactionType;
import com.automq.stream.s3.operator.MemoryObjectStorage;
import com.automq.stream.s3.operator.ObjectStorage;
import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.io.TempDir;

/** AutoMQ's own s3stream on the plug-in: runs if AUTOMQ_HOME names a folder with its source. */
class S3streamTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    @TempDir
    static Path bucket;

    private static S3streamNode open(int nodeId) {
        return open(nodeId, S3streamNode.directory(bucket));
    }

    private static S3streamNode open(int nodeId, ObjectStorage storage) {
        return S3streamNode.open(CONTROLLERS.endpoints(), storage, nodeId);
    }

    @Test
    void aWriteAheadLogIsRecoveredAfterACrash() throws Exception {
        List<Long> streamIds = CrashingNode.run(CONTROLLERS.endpoints(), bucket, 101);
        try (S3streamNode node = open(101)) {
            for (long streamId : streamIds) {
                Stream stream = node.open(streamId, 2);
                assertEquals(CrashingNode.ACKNOWLEDGED, stream.nextOffset());
                Batches.assertReadable(stream, 0, CrashingNode.ACKNOWLEDGED);
                Batches.appendAll(stream, CrashingNode.ACKNOWLEDGED, CrashingNode.ACKNOWLEDGED + 100);
            }
        }
    }

    @Test
    void aDeadNodeIsRecoveredByAnother() throws Exception {
        List<Long> streamIds = CrashingNode.run(CONTROLLERS.endpoints(), bucket, 102);
        try (S3streamNode node = open(103)) {
            assertEquals(102, get(node.recovered()).getNodeId());
            for (long streamId : streamIds) {
                Batches.assertReadable(node.open(streamId, 2), 0, CrashingNode.ACKNOWLEDGED);
            }
        }
    }

    @Test
    void compactionsKeepEveryBatch() {
        List<Long> streamIds = new ArrayList<>();
        ObjectStorage memory = new MemoryObjectStorage();
        try (S3streamNode node = open(104, memory)) {
            List<Stream> streams = new ArrayList<>();
            for (int row = 0; row < 4; row++) {
                streams.add(node.create());
                streamIds.add(streams.get(row).streamId());
            }
            for (int start = 0; start < 2500; start += 500) {
                for (Stream stream : streams) {
                    Batches.appendAll(stream, start, start + 500);
                }
                node.upload(streams.get(0));
            }
            int before = node.streamSetObjects();
            assertTrue(before >= 5, "stream set objects: " + before);
            node.compact();
            assertTrue(node.streamSetObjects() < before);
            streams.forEach(stream -> Batches.assertReadable(stream, 0, 2500));

            for (int start = 2500; start < 4500; start += 500) {
                for (Stream stream : streams) {
                    Batches.appendAll(stream, start, start + 500);
                }
                node.upload(streams.get(0));
                node.split();
                assertEquals(0, node.streamSetObjects());
            }
            streams.forEach(stream -> Batches.assertReadable(stream, 0, 4500));

            Stream merged = streams.get(0);
            int objects = node.streamObjects(merged);
            assertTrue(objects > 2, "stream objects: " + objects);
            node.compact(merged, CompactionType.MINOR_V1);
            assertTrue(node.streamObjects(merged) < objects);
            Batches.assertReadable(merged, 0, 4500);

            Stream linked = streams.get(1);
            node.compact(linked, CompactionType.MAJOR_V1);
            assertTrue(node.streamObjects(linked) < objects);
            Batches.assertReadable(linked, 0, 4500);

            get(linked.trim(2000));
            get(merged.trim(4500));
            Batches.appendAll(merged, 4500, 5000);
            get(merged.trim(4800)); // above the committed end
            node.upload(merged);
            node.compact(linked, CompactionType.CLEANUP_V1);
            node.compact(merged, CompactionType.CLEANUP);
            Batches.assertReadable(linked, 2000, 4500);
            Batches.assertReadable(merged, 4800, 5000);
            get(streams.get(3).destroy());
        }
        try (S3streamNode node = open(104, memory)) { // with cold caches
            Batches.assertReadable(node.open(streamIds.get(0), 2), 4800, 5000);
            Batches.assertReadable(node.open(streamIds.get(1), 2), 2000, 4500);
            Batches.assertReadable(node.open(streamIds.get(2), 2), 0, 4500);
        }
    }

    @Test
    void aStreamMovesByAFastClose() {
        try (S3streamNode first = open(105);
                S3streamNode second = open(106)) {
            for (int round = 0; round < 4; round++) {
                Stream stream = first.create();
                Batches.appendAll(stream, 0, 1000);
                first.upload(stream);
                Batches.appendAll(stream, 1000, 2000);
                CompletableFuture<Void> closed = stream.close();
                get(closed);

                Stream moved = second.open(stream.streamId(), 2);
                assertEquals(2000, moved.nextOffset());
                Batches.appendAll(moved, 2000, 2500);
                Batches.assertReadable(moved, 0, 2500);
            }
        }
    }

    @Test
    void noAppendFailsWhileLeadersAreKilled() throws Exception {
        try (S3streamNode node = open(107);
                StreammetaClient client =
                        StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            Stream stream = node.create();
            List<CompletableFuture<AppendResult>> appended = new ArrayList<>();
            for (int round = 0; round < 3; round++) {
                int leader = await(client.describeCluster()).leaderId().orElseThrow();
                int start = round * 20_000;
                appended.addAll(Batches.append(stream, start, start + 10_000));
                CONTROLLERS.kill(leader);
                node.upload(stream);
                appended.addAll(Batches.append(stream, start + 10_000, start + 20_000));
                CONTROLLERS.start(leader);
                node.upload(stream);
            }
            appended.forEach(Node::get);
            Batches.assertReadable(stream, 0, 60_000);
            get(stream.close());
            Batches.assertReadable(node.open(stream.streamId(), 2), 0, 60_000);
        }
    }
}
