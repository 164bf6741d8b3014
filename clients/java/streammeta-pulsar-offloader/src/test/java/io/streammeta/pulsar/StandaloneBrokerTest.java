package io.streammeta.pulsar;

import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;
import static org.junit.jupiter.api.Assumptions.assumeTrue;

import io.streammeta.client.NamedObject;
import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import io.streammeta.testkit.Waiting;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Properties;
import java.util.Random;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.admin.LongRunningProcessStatus;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.common.policies.data.ManagedLedgerInternalStats.LedgerInfo;
import org.apache.pulsar.common.policies.data.RetentionPolicies;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.io.TempDir;

/** A stock broker that offloads with the archive, and serves what BookKeeper no longer has. */
class StandaloneBrokerTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static final String TOPIC = "persistent://public/default/orders";
    private static final int MESSAGES = 5000;
    private static final int ENTRIES_PER_LEDGER = 1000;

    @Test
    void everyMessageIsReadFromTheBucket(@TempDir Path folder) throws Exception {
        String archive = System.getProperty("offloader.nar", "");
        assumeTrue(Files.isRegularFile(Path.of(archive)), "the archive is not built");

        Properties options = options(String.join(",", CONTROLLERS.endpoints()), CONTROLLERS.bucket());
        try (Standalone broker = new Standalone(folder, Path.of(archive), options)) {
            broker.start();
            List<Long> offloaded;
            try (PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(broker.webAddress()).build();
                    PulsarClient client = PulsarClient.builder().serviceUrl(broker.address()).build()) {
                admin.namespaces().setRetention("public/default", new RetentionPolicies(-1, -1));
                MessageId last = produce(client);
                offloadWhileTheLeaderIsKilled(admin, last);

                offloaded = admin.topics().getInternalStats(TOPIC).ledgers.stream()
                        .filter(ledger -> ledger.offloaded)
                        .map((LedgerInfo ledger) -> ledger.ledgerId)
                        .toList();
                assertEquals(MESSAGES / ENTRIES_PER_LEDGER, offloaded.size());
                admin.topics().trimTopic(TOPIC);
                Waiting.until("BookKeeper's ledgers are deleted", () -> {
                    String log = Files.readString(broker.log());
                    return offloaded.stream().allMatch(ledger -> log.contains("offloaded ledger " + ledger + " from bookkeeper"));
                });
            }

            broker.kill();
            broker.start();
            try (PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(broker.webAddress()).build();
                    PulsarClient client = PulsarClient.builder().serviceUrl(broker.address()).build()) {
                readAll(client);
                assertEquals(2 * offloaded.size(), copies().size());

                admin.topics().delete(TOPIC, true);
                Waiting.until("the copies of the deleted topic are deleted", () -> copies().isEmpty());
            }
        }
    }

    /** Returns the options of small ledgers, which are offloaded and deleted soon. */
    static Properties options(String endpoints, String bucket) {
        Properties options = new Properties();
        options.setProperty("managedLedgerOffloadExtraConfigEndpoints", endpoints);
        options.setProperty("managedLedgerOffloadExtraConfigBucket", bucket);
        options.setProperty("managedLedgerMaxEntriesPerLedger", Integer.toString(ENTRIES_PER_LEDGER));
        options.setProperty("managedLedgerMinLedgerRolloverTimeMinutes", "0");
        options.setProperty("managedLedgerOffloadDeletionLagMs", "0");
        return options;
    }

    private static MessageId produce(PulsarClient client) throws Exception {
        try (Producer<byte[]> producer = client.newProducer()
                .topic(TOPIC)
                .enableBatching(false)
                .blockIfQueueFull(true)
                .create()) {
            CompletableFuture<MessageId> last = null;
            for (int message = 0; message < MESSAGES; message++) {
                last = producer.sendAsync(body(message));
            }
            producer.flush();
            producer.send("the ledger of this message stays open".getBytes());
            return last.get();
        }
    }

    private static void offloadWhileTheLeaderIsKilled(PulsarAdmin admin, MessageId last) throws Exception {
        int leader;
        try (StreammetaClient client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            leader = await(client.describeCluster()).leaderId().orElseThrow();
        }
        // The position after the last one: a ledger is offloaded when all of it lies before.
        MessageId end = admin.topics().getLastMessageId(TOPIC);
        assertTrue(end.compareTo(last) > 0);
        admin.topics().triggerOffload(TOPIC, end);
        CONTROLLERS.kill(leader);
        Waiting.until("the offload ends", () -> {
            var status = admin.topics().offloadStatus(TOPIC);
            if (status.getStatus() == LongRunningProcessStatus.Status.ERROR) {
                throw new AssertionError(status.getLastError());
            }
            return status.getStatus() == LongRunningProcessStatus.Status.SUCCESS;
        });
        CONTROLLERS.start(leader);
    }

    private static void readAll(PulsarClient client) throws Exception {
        try (Reader<byte[]> reader =
                client.newReader().topic(TOPIC).startMessageId(MessageId.earliest).create()) {
            for (int message = 0; message < MESSAGES; message++) {
                Message<byte[]> found = reader.readNext(60, TimeUnit.SECONDS);
                assertArrayEquals(body(message), found == null ? null : found.getData(), "message " + message);
            }
        }
    }

    private static List<NamedObject> copies() {
        try (StreammetaClient client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            return await(client.namedObjects().list(OffloaderSettings.DEFAULT_PREFIX).toList());
        }
    }

    private static byte[] body(int message) {
        byte[] body = new byte[1000];
        new Random(message).nextBytes(body);
        return body;
    }
}
