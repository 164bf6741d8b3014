package io.streammeta.pulsar;

import io.streammeta.testkit.FaultRun;
import io.streammeta.testkit.FaultyBroker;
import io.streammeta.testkit.Waiting;
import java.nio.file.Path;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import java.util.function.Predicate;
import org.apache.pulsar.client.admin.LongRunningProcessStatus.Status;
import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.api.Message;
import org.apache.pulsar.client.api.MessageId;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Reader;
import org.apache.pulsar.common.policies.data.ManagedLedgerInternalStats.LedgerInfo;
import org.apache.pulsar.common.policies.data.RetentionPolicies;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfSystemProperty;

/** A stock broker in a fault run, which offloads each ledger when the next one begins. */
@EnabledIfSystemProperty(named = "offloader.nar", matches = ".+")
class FaultRunTest {
    private static final String TOPIC = "persistent://public/default/orders";

    @Test
    void serve() throws Exception {
        FaultRun.serve("pulsar", Broker::new);
    }

    private static final class Broker implements FaultyBroker {
        private final Standalone broker;
        private final PulsarAdmin admin;
        private final PulsarClient client;
        private final Producer<byte[]> producer;

        Broker(FaultRun.World world) throws Exception {
            Properties options = StandaloneBrokerTest.options(world.endpoints(), world.bucket());
            options.setProperty("managedLedgerOffloadAutoTriggerSizeThresholdBytes", "0");
            broker = new Standalone(world.folder(), Path.of(System.getProperty("offloader.nar")), options);
            broker.start();
            admin = PulsarAdmin.builder().serviceHttpUrl(broker.webAddress()).build();
            client = PulsarClient.builder().serviceUrl(broker.address()).build();
            admin.namespaces().setRetention("public/default", new RetentionPolicies(-1, -1));
            producer = client.newProducer().topic(TOPIC).enableBatching(false).create();
        }

        @Override
        public void kill() {
            broker.kill();
        }

        @Override
        public void start() throws Exception {
            broker.start();
        }

        @Override
        public void write(byte[] message) throws Exception {
            producer.send(message);
        }

        /** Closes the ledger by a restart, and offloads all but the next. Reads prefer the copies. */
        @Override
        public void settle() throws Exception {
            kill();
            start();
            Waiting.until("a message in the next ledger", () -> {
                write(FaultRun.FILLER);
                return true;
            });
            Waiting.until("all ledgers but the last are offloaded", () -> {
                if (admin.topics().offloadStatus(TOPIC).getStatus() != Status.RUNNING) {
                    admin.topics().triggerOffload(TOPIC, admin.topics().getLastMessageId(TOPIC));
                }
                List<LedgerInfo> ledgers = admin.topics().getInternalStats(TOPIC).ledgers;
                return ledgers.stream().limit(ledgers.size() - 1).allMatch(ledger -> ledger.offloaded);
            });
        }

        @Override
        public void read(Predicate<byte[]> reader) throws Exception {
            try (Reader<byte[]> messages =
                    client.newReader().topic(TOPIC).startMessageId(MessageId.earliest).create()) {
                Message<byte[]> found = messages.readNext(1, TimeUnit.MINUTES);
                while (found != null && reader.test(found.getData())) {
                    found = messages.readNext(1, TimeUnit.MINUTES);
                }
            }
        }

        @Override
        public void close() throws Exception {
            client.shutdown();
            admin.close();
            broker.close();
        }
    }
}
