package io.streammeta.rocketmq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.jar.JarEntry;
import java.util.jar.JarFile;
import java.util.stream.Stream;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.exception.RemotingException;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfSystemProperty;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.io.TempDir;

/** The jar in a stock broker: what was sent is read from the bucket after the broker lost its disk. */
@EnabledIfSystemProperty(named = "streammeta.plugin.jar", matches = ".+")
class StockBrokerTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static final Path PLUGIN = Path.of(System.getProperty("streammeta.plugin.jar", ""));
    private static final String TOPIC = "orders";
    private static final int MESSAGES = 3_000;
    private static final int QUEUES = 4;
    private static final Duration SEND = Duration.ofMinutes(2);
    private static final Duration UPLOAD = Duration.ofMinutes(3);

    @TempDir
    Path folder;

    @Test
    void everyMessageIsReadFromTheTierAfterTheDiskIsLost() throws Exception {
        try (StockBroker broker = new StockBroker(folder, PLUGIN, options())) {
            DefaultMQProducer producer = producer(broker);
            try {
                send(producer, 0, MESSAGES / 3);
                waitForParts();
                broker.kill(); // in the middle of its first uploads
                broker.start();
                int leader = leader();
                CompletableFuture<Void> killed = CompletableFuture.runAsync(() -> CONTROLLERS.kill(leader));
                send(producer, MESSAGES / 3, MESSAGES);
                killed.join();
                assertEquals(expected(), receive(broker));
                CONTROLLERS.start(leader);
            } finally {
                producer.shutdown();
            }

            broker.kill();
            for (String lost : List.of("commitlog", "consumequeue", "index", "tiered_index_file")) {
                delete(broker.store().resolve(lost));
            }
            broker.start();
            assertEquals(expected(), receive(broker));
            assertFalse(broker.log().contains("IllegalAccessError"), "classes of the broker and the plug-in clash");
        }
    }

    @Test
    void everyClassOfTheJarIsItsOwn() throws IOException {
        try (JarFile jar = new JarFile(PLUGIN.toFile())) {
            List<String> foreign = jar.stream()
                    .map(JarEntry::getName)
                    .filter(name -> name.endsWith(".class"))
                    .map(name -> name.replaceFirst("^META-INF/versions/[0-9]+/", ""))
                    .filter(name -> !name.startsWith("io/streammeta/"))
                    .toList();
            assertEquals(List.of(), foreign);
        }
    }

    /** Returns the options of the example, with settings of this test. */
    private Map<String, String> options() throws IOException {
        Path settings = folder.resolve("streammeta.properties");
        Files.write(
                settings,
                List.of(
                        "controllers = " + String.join(", ", CONTROLLERS.endpoints()),
                        "bucket = " + CONTROLLERS.bucket(),
                        "node.id = 7"));
        Properties example = new Properties();
        try (var reader = Files.newBufferedReader(Path.of("example/broker.conf"))) {
            example.load(reader);
        }
        Map<String, String> options = new TreeMap<>();
        example.stringPropertyNames().forEach(name -> options.put(name, example.getProperty(name)));
        options.remove("namesrvAddr");
        options.put("tieredStoreFilePath", settings.toString());
        options.put("tieredStorageLevel", "FORCE");
        options.put("tieredStoreGroupCommitTimeout", "1000");
        options.put("tieredStoreIndexFileMaxHashSlotNum", "1000");
        options.put("tieredStoreIndexFileMaxIndexNum", "1000");
        return options;
    }

    private static DefaultMQProducer producer(StockBroker broker) throws MQClientException {
        DefaultMQProducer producer = new DefaultMQProducer("producers");
        producer.setNamesrvAddr(broker.nameServerAddress());
        producer.setDefaultTopicQueueNums(QUEUES);
        producer.start();
        return producer;
    }

    private static void send(DefaultMQProducer producer, int from, int to) throws Exception {
        long end = System.nanoTime() + SEND.toNanos();
        for (int number = from; number < to; number++) {
            Message message = new Message(TOPIC, "tag", "key-" + number, body(number).getBytes(StandardCharsets.UTF_8));
            while (!isSent(producer, message)) {
                assertTrue(System.nanoTime() < end, "the broker accepted too few messages");
            }
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

    /** Reads all queues from their beginning until there are enough messages. */
    private static TreeSet<String> receive(StockBroker broker) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("readers-" + UUID.randomUUID());
        consumer.setNamesrvAddr(broker.nameServerAddress());
        consumer.setAutoCommit(false);
        consumer.start();
        try {
            TreeSet<String> received = new TreeSet<>();
            long end = System.nanoTime() + UPLOAD.toNanos();
            List<MessageQueue> queues = queues(consumer, end);
            consumer.assign(queues);
            for (MessageQueue queue : queues) {
                consumer.seek(queue, 0);
            }
            while (received.size() < MESSAGES && System.nanoTime() < end) {
                for (MessageExt message : consumer.poll(1_000)) {
                    received.add(new String(message.getBody(), StandardCharsets.UTF_8));
                }
            }
            return received;
        } finally {
            consumer.shutdown();
        }
    }

    private static List<MessageQueue> queues(DefaultLitePullConsumer consumer, long end) throws Exception {
        while (true) {
            try {
                return List.copyOf(consumer.fetchMessageQueues(TOPIC));
            } catch (MQClientException notRegistered) {
                assertTrue(System.nanoTime() < end, notRegistered.toString());
                Thread.sleep(500);
            }
        }
    }

    private static TreeSet<String> expected() {
        TreeSet<String> bodies = new TreeSet<>();
        for (int number = 0; number < MESSAGES; number++) {
            bodies.add(body(number));
        }
        return bodies;
    }

    private static String body(int number) {
        return "message " + number + " " + "x".repeat(number % 500);
    }

    private static void waitForParts() throws InterruptedException {
        long end = System.nanoTime() + UPLOAD.toNanos();
        try (StreammetaClient client =
                StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            while (StreammetaClient.await(client.namedObjects().list("").page("")).items().isEmpty()) {
                assertTrue(System.nanoTime() < end, "the broker uploaded nothing");
                Thread.sleep(20);
            }
        }
    }

    private static int leader() {
        try (StreammetaClient client =
                StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            return StreammetaClient.await(client.describeCluster()).leaderId().orElseThrow();
        }
    }

    private static void delete(Path path) throws IOException {
        if (!Files.exists(path)) {
            return;
        }
        try (Stream<Path> files = Files.walk(path)) {
            for (Path file : files.sorted(Comparator.reverseOrder()).toList()) {
                Files.delete(file);
            }
        }
    }
}
