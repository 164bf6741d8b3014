package io.streammeta.rocketmq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.testkit.Controllers;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.function.BooleanSupplier;
import java.util.stream.IntStream;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tieredstore.common.FileSegmentType;
import org.apache.rocketmq.tieredstore.metadata.entity.FileSegmentMetadata;
import org.apache.rocketmq.tieredstore.metadata.entity.TopicMetadata;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.TestInfo;
import org.junit.jupiter.api.extension.RegisterExtension;

/** The metadata of a broker: kept over restarts, written by one process, read by itself from memory. */
class TierTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private final List<Tier> open = new ArrayList<>();
    private String broker;

    @BeforeEach
    void name(TestInfo test) {
        broker = test.getDisplayName().replaceAll("\\W", "");
    }

    @AfterEach
    void close() {
        open.forEach(Tier::close);
    }

    @Test
    void metadataSurvivesARestart() {
        StreammetaMetadataStore before = new StreammetaMetadataStore(start(1));
        TopicMetadata topic = before.addTopic("orders", 24);
        before.addTopic("other", -1);
        MessageQueue queue = new MessageQueue("orders", broker, 3);
        before.addQueue(queue, 7);
        before.updateFileSegment(segment("orders", 0, 100));
        before.updateFileSegment(segment("orders", 1 << 30, 5));
        before.updateFileSegment(segment("orders-2", 0, 9));
        topic.setReserveTime(48);
        before.updateTopic(topic);

        StreammetaMetadataStore after = new StreammetaMetadataStore(start(1));
        assertEquals(48, after.getTopic("orders").getReserveTime());
        assertEquals(topic.getTopicId(), after.getTopic("orders").getTopicId());
        assertEquals(7, after.getQueue(queue).getMaxOffset());
        assertEquals(queue, after.getQueue(queue).getQueue());
        List<Long> offsets = new ArrayList<>();
        after.iterateFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, found -> offsets.add(found.getBaseOffset()));
        assertEquals(List.of(0L, 1L << 30), offsets);
        assertEquals(segment("orders", 0, 100), after.getFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0));
        assertNull(after.getFileSegment(path("orders"), FileSegmentType.CONSUME_QUEUE, 0));
    }

    @Test
    void topicIdsAreNeverGivenTwice() {
        StreammetaMetadataStore store = new StreammetaMetadataStore(start(2));
        Set<Long> ids = ConcurrentHashMap.newKeySet();
        IntStream.range(0, 20).parallel().forEach(topic -> ids.add(store.addTopic("topic-" + topic, -1).getTopicId()));
        assertEquals(20, ids.size());

        store.deleteTopic("topic-19");
        StreammetaMetadataStore after = new StreammetaMetadataStore(start(2));
        assertNull(after.getTopic("topic-19"));
        assertTrue(ids.add(after.addTopic("topic-19", -1).getTopicId()));
        assertEquals(ids.size(), 21);
    }

    @Test
    void readsReturnCopies() {
        StreammetaMetadataStore store = new StreammetaMetadataStore(start(3));
        store.updateFileSegment(segment("orders", 0, 100));
        FileSegmentMetadata copy = store.getFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0);
        copy.setSize(500); // the broker changes it before it is stored
        assertEquals(100, store.getFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0).getSize());
    }

    @Test
    void updatesDoNotRestoreWhatWasDeleted() {
        StreammetaMetadataStore store = new StreammetaMetadataStore(start(4));
        TopicMetadata topic = store.addTopic("orders", -1);
        MessageQueue queue = new MessageQueue("orders", broker, 0);
        var added = store.addQueue(queue, 0);
        store.deleteQueue(queue);
        store.deleteTopic("orders");
        store.deleteTopic("orders");
        store.updateQueue(added);
        store.updateTopic(topic);
        assertNull(store.getTopic("orders"));
        assertNull(store.getQueue(queue));
    }

    @Test
    void aReplacedProcessWritesNoMore() {
        StreammetaMetadataStore former = new StreammetaMetadataStore(start(5));
        former.updateFileSegment(segment("orders", 0, 100));
        StreammetaMetadataStore newer = new StreammetaMetadataStore(start(5));
        newer.updateFileSegment(segment("orders", 0, 200));

        IllegalStateException error =
                assertThrows(IllegalStateException.class, () -> former.updateFileSegment(segment("orders", 0, 150)));
        assertTrue(error.getMessage().contains("newer process"), error.getMessage());
        // Also when its own watch has told it the newer value.
        waitUntil(() -> former.getFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0).getSize() == 200);
        assertThrows(
                IllegalStateException.class,
                () -> former.deleteFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0));
        assertEquals(200, newer.getFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0).getSize());
    }

    @Test
    void aDeletedKeyStaysDeletedWhileTheWatchIsBehind() {
        StreammetaMetadataStore store = new StreammetaMetadataStore(start(6));
        for (int round = 0; round < 50; round++) {
            store.updateFileSegment(segment("orders", 0, round));
            store.deleteFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0);
            store.deleteFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0);
            assertNull(store.getFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0));
        }
        store.updateFileSegment(segment("orders", 0, 7));
        assertNotNull(store.getFileSegment(path("orders"), FileSegmentType.COMMIT_LOG, 0));
    }

    @Test
    void anotherNodeMayNotTakeTheTier() {
        start(7);
        IllegalStateException error = assertThrows(IllegalStateException.class, () -> start(8));
        assertTrue(error.getMessage().contains("belongs to node 7"), error.getMessage());
    }

    @Test
    void brokersDoNotSeeEachOther() {
        StreammetaMetadataStore one = new StreammetaMetadataStore(start(9));
        one.addTopic("orders", -1);
        broker += "2";
        StreammetaMetadataStore other = new StreammetaMetadataStore(start(10));
        assertNull(other.getTopic("orders"));
        other.destroy();
        assertNotNull(one.getTopic("orders"));
    }

    private Tier start(int nodeId) {
        TierSettings settings = new TierSettings(CONTROLLERS.endpoints(), CONTROLLERS.bucket(), nodeId, null);
        Tier tier = Tier.open(settings, "cluster", broker);
        open.add(tier);
        return tier;
    }

    private String path(String topic) {
        return broker + "/" + topic + "/0";
    }

    private FileSegmentMetadata segment(String topic, long baseOffset, long size) {
        var segment = new FileSegmentMetadata(path(topic), baseOffset, FileSegmentType.COMMIT_LOG.getCode());
        segment.setSize(size);
        segment.setEndTimestamp(Long.MAX_VALUE);
        return segment;
    }

    private static void waitUntil(BooleanSupplier condition) {
        long end = System.nanoTime() + Duration.ofSeconds(10).toNanos();
        while (!condition.getAsBoolean()) {
            assertTrue(System.nanoTime() < end, "it did not happen within 10 s");
            Thread.onSpinWait();
        }
    }
}
