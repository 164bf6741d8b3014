package io.streammeta.rocketmq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import io.streammeta.testkit.Relay;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.List;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.MessageStoreExecutor;
import org.apache.rocketmq.tieredstore.common.FileSegmentType;
import org.apache.rocketmq.tieredstore.metadata.entity.FileSegmentMetadata;
import org.apache.rocketmq.tieredstore.stream.FileSegmentInputStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

/** Commits while connections break and the leading controller is killed: each byte is stored once, in order. */
class FaultsTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.behindRelays();

    private static final String PATH = "broker/orders/0";
    private static final int COMMITS = 60;
    private static final int LENGTH = 500;
    private static final int DEADLINE_SECONDS = 5;

    @Test
    void commitsSurviveLostAnswersAndTheLeadersDeath() throws Exception {
        MessageStoreExecutor executor = new MessageStoreExecutor();
        byte[] all = new byte[COMMITS * LENGTH];
        new Random(1).nextBytes(all);
        AtomicInteger done = new AtomicInteger();
        try (Tier tier = open()) {
            StreammetaMetadataStore metadata = new StreammetaMetadataStore(tier);
            FileSegmentMetadata facts = new FileSegmentMetadata(PATH, 0, FileSegmentType.COMMIT_LOG.getCode());
            metadata.updateFileSegment(facts);
            var segment = new StreammetaFileSegment(
                    tier, new MessageStoreConfig(), FileSegmentType.COMMIT_LOG, PATH, 0, executor);
            CompletableFuture<Void> commits = CompletableFuture.runAsync(() -> {
                for (int commit = 0; commit < COMMITS; commit++) {
                    int position = commit * LENGTH;
                    ByteBuffer bytes = ByteBuffer.wrap(all, position, LENGTH).slice();
                    var stream = new FileSegmentInputStream(FileSegmentType.COMMIT_LOG, List.of(bytes), LENGTH);
                    assertTrue(segment.commit0(stream, position, LENGTH, true).join());
                    facts.setSize(position + LENGTH);
                    metadata.updateFileSegment(facts);
                    done.incrementAndGet();
                }
            });

            int killed = 0;
            while (!commits.isDone()) {
                CONTROLLERS.relays().forEach(Relay::resetAll);
                if (killed == 0 && done.get() > COMMITS / 3) {
                    killed = leader();
                    CONTROLLERS.kill(killed);
                }
                Thread.sleep(300);
            }
            commits.join();
            CONTROLLERS.start(killed);
        }

        try (Tier tier = open()) {
            StreammetaMetadataStore metadata = new StreammetaMetadataStore(tier);
            assertEquals(all.length, metadata.getFileSegment(PATH, FileSegmentType.COMMIT_LOG, 0).getSize());
            var segment = new StreammetaFileSegment(
                    tier, new MessageStoreConfig(), FileSegmentType.COMMIT_LOG, PATH, 0, executor);
            assertEquals(all.length, segment.getSize());
            assertEquals(ByteBuffer.wrap(all), segment.read0(0, all.length).join());
            segment.destroyFile();
            assertNull(metadata.getFileSegment(PATH, FileSegmentType.COMMIT_LOG, 0));
        } finally {
            executor.shutdown();
        }
    }

    @Test
    void anUpdateOfASegmentWaitsForTheControllers() throws Exception {
        var builder = StreammetaClient.builder().deadline(Duration.ofSeconds(DEADLINE_SECONDS));
        try (Tier tier = Tier.open(settings(), "cluster", "broker", builder)) {
            StreammetaMetadataStore metadata = new StreammetaMetadataStore(tier);
            FileSegmentMetadata facts = new FileSegmentMetadata(PATH, 1, FileSegmentType.COMMIT_LOG.getCode());
            CONTROLLERS.relays().forEach(Relay::cut);
            CompletableFuture<Void> update = CompletableFuture.runAsync(() -> metadata.updateFileSegment(facts));
            assertThrows(TimeoutException.class, () -> update.get(DEADLINE_SECONDS + 1, TimeUnit.SECONDS));
            CONTROLLERS.relays().forEach(Relay::heal);
            update.get(30, TimeUnit.SECONDS);
            assertNotNull(metadata.getFileSegment(PATH, FileSegmentType.COMMIT_LOG, 1));
        }
    }

    private static Tier open() {
        return Tier.open(settings(), "cluster", "broker");
    }

    private static TierSettings settings() {
        return new TierSettings(CONTROLLERS.endpoints(), CONTROLLERS.bucket(), 1, null);
    }

    private static int leader() {
        try (StreammetaClient client =
                StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            return StreammetaClient.await(client.describeCluster()).leaderId().orElseThrow();
        }
    }
}
