package io.streammeta.rocketmq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.streammeta.client.BrokerSession;
import io.streammeta.client.NamedObject;
import io.streammeta.client.NamedObjectToCommit;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.LimitExceededException;
import io.streammeta.testkit.Controllers;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Random;
import java.util.concurrent.CompletionException;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.MessageStoreExecutor;
import org.apache.rocketmq.tieredstore.common.AppendResult;
import org.apache.rocketmq.tieredstore.common.FileSegmentType;
import org.apache.rocketmq.tieredstore.metadata.entity.FileSegmentMetadata;
import org.apache.rocketmq.tieredstore.stream.FileSegmentInputStream;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInfo;
import org.junit.jupiter.api.extension.RegisterExtension;

/** Bytes of segments: committed once, read back, and gone with their segment. */
class FileSegmentTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static final MessageStoreExecutor EXECUTOR = new MessageStoreExecutor();
    private static final Random RANDOM = new Random(5);
    private static final int NODE_ID = 20;
    private static final String PARTS = "rocketmq-tiered/cluster/";

    private String broker;
    private Tier tier;

    @BeforeEach
    void start(TestInfo test) {
        broker = test.getDisplayName().replaceAll("\\W", "");
        tier = open();
    }

    @AfterEach
    void close() {
        tier.close();
    }

    @AfterAll
    static void stop() {
        EXECUTOR.shutdown();
    }

    @Test
    void commitsAreReadBackAcrossParts() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        byte[] all = random(3_000);
        commit(segment, all, 0, 1_000);
        commit(segment, all, 1_000, 1_500);
        commit(segment, all, 2_500, 500);

        assertEquals(3_000, segment.getSize());
        assertEquals(List.of(1_000L, 1_500L, 500L), parts().stream().map(NamedObject::size).toList());
        for (StreammetaFileSegment reader : List.of(segment, segment(FileSegmentType.COMMIT_LOG))) {
            assertEquals(ByteBuffer.wrap(all), reader.read0(0, 3_000).join());
            assertEquals(ByteBuffer.wrap(all, 999, 1_502), reader.read0(999, 1_502).join());
            assertEquals(ByteBuffer.wrap(all, 1_000, 1), reader.read0(1_000, 1).join());
            assertThrows(CompletionException.class, () -> reader.read0(2_999, 2).join());
        }
    }

    @Test
    void aRepeatAfterAnUnknownOutcomeSucceeds() {
        byte[] all = random(300);
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        assertEquals(0, segment.getSize()); // what it knows from now on
        commit(segment(FileSegmentType.COMMIT_LOG), all, 0, 100); // the attempt without an answer

        commit(segment, all, 0, 100);
        commit(segment, all, 100, 200);
        assertEquals(2, parts().size());
        assertEquals(ByteBuffer.wrap(all), segment.read0(0, 300).join());
    }

    @Test
    void otherBytesAreNeverTakenForARepeat() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        assertEquals(0, segment.getSize());
        byte[] first = random(100);
        commit(segment(FileSegmentType.COMMIT_LOG), first, 0, 100);

        assertThrows(CompletionException.class, () -> commit(segment, random(100), 0, 100));
        assertThrows(CompletionException.class, () -> commit(segment, random(90), 0, 90));
        assertEquals(100, segment.getSize()); // listed again
        assertEquals(ByteBuffer.wrap(first), segment.read0(0, 100).join());
    }

    @Test
    void aCommitBehindTheEndIsRejected() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        assertThrows(CompletionException.class, () -> commit(segment, random(10), 5, 5));
        assertEquals(0, segment.getSize());
        assertFalse(segment.exists());
    }

    @Test
    void aLargeCommitIsSeveralPartsAtOnce() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        byte[] all = random(SegmentObjects.PART_MAX_BYTES + 10);
        commit(segment, all, 0, all.length);
        assertEquals(List.of((long) SegmentObjects.PART_MAX_BYTES, 10L), parts().stream().map(NamedObject::size).toList());
        int start = SegmentObjects.PART_MAX_BYTES - 5;
        assertEquals(ByteBuffer.wrap(all, start, 15), segment.read0(start, 15).join());
    }

    @Test
    void anIndexFileReplacesTheOneOfACrash() {
        byte[] old = random(200);
        commit(segment(FileSegmentType.INDEX), old, 0, 200);
        StreammetaFileSegment segment = segment(FileSegmentType.INDEX);
        byte[] index = random(150);
        commit(segment, index, 0, 150);
        assertEquals(150, segment.getSize());
        assertEquals(ByteBuffer.wrap(index), segment.read0(0, 150).join());
        assertEquals(1, parts().size());
    }

    @Test
    void aDestroyedSegmentLeavesNothing() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        byte[] all = random(200);
        commit(segment, all, 0, 100);
        commit(segment, all, 100, 100);
        assertTrue(segment.exists());

        segment.destroyFile();
        segment.destroyFile();
        assertFalse(segment.exists());
        assertEquals(List.of(), parts());
        assertNull(new StreammetaMetadataStore(tier).getFileSegment(path(), FileSegmentType.COMMIT_LOG, 0));
        // A commit that was in flight finds no owner, so that no part outlives its segment.
        assertThrows(CompletionException.class, () -> commit(segment, all, 0, 100));
        assertEquals(List.of(), parts());
    }

    @Test
    void aReplacedProcessCommitsNoMore() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        byte[] all = random(200);
        commit(segment, all, 0, 100);
        try (Tier newer = open()) {
            assertThrows(CompletionException.class, () -> commit(segment, all, 100, 100));
            assertEquals(100, segment.getSize());
            assertThrows(RuntimeException.class, segment::destroyFile);
            assertEquals(1, parts().size());
        }
    }

    @Test
    void aFailedLookIsNoAbsence() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        tier.close();
        assertThrows(RuntimeException.class, segment::exists);
        assertThrows(RuntimeException.class, segment::getSize); // the broker would begin at -1
        assertEquals(AppendResult.SUCCESS, segment.append(ByteBuffer.wrap(random(10)), 1));
        for (int attempt = 0; attempt < 2; attempt++) { // the broker's lock of commits is free again
            assertFalse(segment.commitAsync().join());
            assertEquals(-1, segment.getSize());
            assertEquals(0, segment.getCommitPosition());
        }
        assertThrows(RuntimeException.class, segment::destroyFile);
    }

    @Test
    void aSegmentMayHaveThousandsOfParts() {
        StreammetaFileSegment segment = segment(FileSegmentType.COMMIT_LOG);
        int count = 3_000; // a part each 30 s, for a day
        try (StreammetaClient client = client();
                BrokerSession other = StreammetaClient.await(
                        client.openSession(new NodeIdentity(NODE_ID + 1, 1), SessionOptions.DEFAULT))) {
            String prefix = new SegmentName(path(), FileSegmentType.COMMIT_LOG, 0).partPrefix(PARTS + broker + "/");
            var owner = tier.keys().owner(segment.getPath());
            for (int start = 0; start < count; start += 1_000) {
                List<NamedObjectToCommit> batch = new ArrayList<>();
                for (long id : StreammetaClient.await(other.objects().prepare(1_000, Duration.ofMinutes(1))).ids()) {
                    String name = prefix + SegmentName.padded(start + batch.size());
                    batch.add(new NamedObjectToCommit(id, name, 1, OptionalLong.empty(), owner, Map.of()));
                }
                StreammetaClient.await(other.namedObjects().commit(batch));
            }
        } catch (LimitExceededException older) {
            assumeTrue(false, "these controllers allow fewer parts: " + older.getMessage());
        }
        assertEquals(count, segment.getSize());
        segment.destroyFile();
        assertEquals(List.of(), parts());
    }

    private Tier open() {
        TierSettings settings = new TierSettings(CONTROLLERS.endpoints(), CONTROLLERS.bucket(), NODE_ID, null);
        return Tier.open(settings, "cluster", broker);
    }

    /** Returns a segment as a broker creates it: the metadata has its key before the first commit. */
    private StreammetaFileSegment segment(FileSegmentType type) {
        new StreammetaMetadataStore(tier).updateFileSegment(new FileSegmentMetadata(path(), 0, type.getCode()));
        return new StreammetaFileSegment(tier, new MessageStoreConfig(), type, path(), 0, EXECUTOR);
    }

    private String path() {
        return broker + "/orders/0";
    }

    private List<NamedObject> parts() {
        try (StreammetaClient client = client()) {
            return StreammetaClient.await(client.namedObjects().list(PARTS + broker + "/").toList());
        }
    }

    private static StreammetaClient client() {
        return StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build();
    }

    private static void commit(StreammetaFileSegment segment, byte[] bytes, int position, int length) {
        ByteBuffer buffer = ByteBuffer.wrap(bytes, position, length).slice();
        var stream = new FileSegmentInputStream(segment.getFileType(), List.of(buffer), length);
        boolean append = segment.getFileType() != FileSegmentType.INDEX;
        assertTrue(segment.commit0(stream, position, length, append).join());
    }

    private static byte[] random(int length) {
        byte[] bytes = new byte[length];
        RANDOM.nextBytes(bytes);
        return bytes;
    }
}
