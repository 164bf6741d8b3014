package io.streammeta.rocketmq;

import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.List;
import java.util.Set;
import java.util.TreeSet;
import java.util.UUID;
import java.util.function.Predicate;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.exception.RemotingException;

/** RocketMQ's own producer and consumer, over all messages of a topic: for tests, and as a program for the demo. */
final class StockClient {
    private static final int QUEUES = 4;
    private static final Duration PATIENCE = Duration.ofMinutes(3);

    private final String nameServer;
    private final String topic;

    StockClient(String nameServer, String topic) {
        this.nameServer = nameServer;
        this.topic = topic;
    }

    /** Sends the lines of a file, or receives so many: {@code send|receive NAME_SERVER TOPIC FILE [COUNT]}. */
    public static void main(String[] arguments) throws Exception {
        StockClient client = new StockClient(arguments[1], arguments[2]);
        Path file = Path.of(arguments[3]);
        if (arguments[0].equals("send")) {
            client.send(Files.readAllLines(file));
        } else {
            Files.write(file, client.receive(Integer.parseInt(arguments[4])));
        }
    }

    /** Returns a producer, started. The caller shuts it down. */
    DefaultMQProducer startProducer() throws MQClientException {
        DefaultMQProducer producer = new DefaultMQProducer("producers");
        producer.setNamesrvAddr(nameServer);
        producer.setDefaultTopicQueueNums(QUEUES);
        producer.start();
        return producer;
    }

    /** Sends messages until the broker has stored each of them, some perhaps twice. */
    void send(List<String> bodies) throws MQClientException, InterruptedException, IOException {
        DefaultMQProducer producer = startProducer();
        try {
            long end = System.nanoTime() + PATIENCE.toNanos();
            for (String body : bodies) {
                byte[] bytes = body.getBytes(StandardCharsets.UTF_8);
                Message message = new Message(topic, "tag", "key-" + body.hashCode(), bytes);
                while (!isSent(producer, message)) {
                    check(end, "the broker accepted too few messages");
                }
            }
        } finally {
            producer.shutdown();
        }
    }

    /** Sends a message, perhaps again: the broker was killed, and name server and client learn of its return late. */
    private static boolean isSent(DefaultMQProducer producer, Message message) throws InterruptedException {
        try {
            return producer.send(message).getSendStatus() == SendStatus.SEND_OK;
        } catch (MQClientException | MQBrokerException | RemotingException | IllegalStateException failed) {
            Thread.sleep(200);
            return false;
        }
    }

    /** Reads all queues from their beginning until there are so many different messages. */
    Set<String> receive(int count) throws MQClientException, InterruptedException, IOException {
        Set<String> received = new TreeSet<>();
        receive(body -> {
            received.add(new String(body, StandardCharsets.UTF_8));
            return received.size() < count;
        });
        return received;
    }

    /** Reads all queues from their beginning, as long as the reader wants more. */
    void receive(Predicate<byte[]> reader) throws MQClientException, InterruptedException, IOException {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("readers-" + UUID.randomUUID());
        consumer.setNamesrvAddr(nameServer);
        consumer.setAutoCommit(false);
        // Not by seek: it interrupts the consumer's own requests, and then calls on the same connection fail.
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.start();
        try {
            long end = System.nanoTime() + PATIENCE.toNanos();
            consumer.assign(queues(consumer, end));
            boolean wantsMore = true;
            while (wantsMore && System.nanoTime() < end) {
                for (MessageExt message : consumer.poll(1_000)) {
                    wantsMore = reader.test(message.getBody());
                }
            }
        } finally {
            consumer.shutdown();
        }
    }

    private List<MessageQueue> queues(DefaultLitePullConsumer consumer, long end)
            throws InterruptedException, IOException {
        while (true) {
            try {
                return List.copyOf(consumer.fetchMessageQueues(topic));
            } catch (MQClientException notRegistered) {
                check(end, notRegistered.toString());
                Thread.sleep(500);
            }
        }
    }

    private static void check(long end, String failure) throws IOException {
        if (System.nanoTime() > end) {
            throw new IOException(failure);
        }
    }
}
