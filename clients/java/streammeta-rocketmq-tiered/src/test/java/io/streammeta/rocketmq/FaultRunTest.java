package io.streammeta.rocketmq;

import io.streammeta.client.NamedObject;
import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.FaultRun;
import io.streammeta.testkit.FaultyBroker;
import io.streammeta.testkit.Waiting;
import java.io.IOException;
import java.util.List;
import java.util.function.Predicate;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfSystemProperty;

/** A stock broker in a fault run. */
@EnabledIfSystemProperty(named = "streammeta.plugin.jar", matches = ".+")
class FaultRunTest {
    private static final int ENTRY_BYTES = 20;

    @Test
    void serve() throws Exception {
        FaultRun.serve("rocketmq", Broker::new);
    }

    @SuppressWarnings("deprecation") // the offsets of a producer have no other call
    private static final class Broker implements FaultyBroker {
        private final StreammetaClient client;
        private final StockBroker broker;
        private final StockClient stock;
        private final DefaultMQProducer producer;

        Broker(FaultRun.World world) throws Exception {
            client = StreammetaClient.builder().endpoints(world.endpoints().split(",")).build();
            broker = new StockBroker(
                    world.folder(),
                    StockBrokerTest.PLUGIN,
                    StockBrokerTest.options(world.folder(), world.endpoints(), world.bucket()));
            stock = new StockClient(broker.nameServerAddress(), StockBrokerTest.TOPIC);
            producer = stock.startProducer();
            // RocketMQ begins the tier of a queue with messages of the last two minutes: all begin before the first fault.
            Waiting.until("the topic", () -> {
                write(FaultRun.FILLER);
                return true;
            });
            List<MessageQueue> queues = producer.fetchPublishMessageQueues(StockBrokerTest.TOPIC);
            for (MessageQueue queue : queues) {
                producer.send(new Message(StockBrokerTest.TOPIC, FaultRun.FILLER), queue);
            }
            Waiting.until("all queues in the tier", () -> uploaded() > queues.size());
        }

        @Override
        public void kill() {
            broker.kill();
        }

        /** Starts it again if it ends, as a supervisor does: it ends without controllers. */
        @Override
        public void start() throws InterruptedException {
            Waiting.until("the broker starts", () -> {
                broker.kill();
                broker.start();
                return true;
            });
        }

        @Override
        public void write(byte[] message) throws Exception {
            SendStatus status = producer.send(new Message(StockBrokerTest.TOPIC, message)).getSendStatus();
            if (status != SendStatus.SEND_OK) {
                throw new IOException(status.toString());
            }
        }

        /** Waits until the tier has the entries of all queues, and deletes the broker's own. */
        @Override
        public void settle() throws Exception {
            long messages = 0;
            for (MessageQueue queue : producer.fetchPublishMessageQueues(StockBrokerTest.TOPIC)) {
                messages += producer.maxOffset(queue);
            }
            long expected = messages;
            Waiting.until(expected + " messages in the tier", () -> expected == uploaded());
            StockBrokerTest.loseDisk(broker);
        }

        private long uploaded() {
            long bytes = 0;
            for (NamedObject part : StreammetaClient.await(client.namedObjects().list("").toList())) {
                if (part.name().contains("/" + StockBrokerTest.TOPIC + "/") && part.name().contains("/CONSUME_QUEUE/")) {
                    bytes += part.size();
                }
            }
            return bytes / ENTRY_BYTES;
        }

        @Override
        public void read(Predicate<byte[]> reader) throws Exception {
            stock.receive(reader);
        }

        @Override
        public void close() {
            producer.shutdown();
            broker.close();
            client.close();
        }
    }
}
