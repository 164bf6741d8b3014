package io.streammeta.rocketmq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Comparator;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.CompletableFuture;
import java.util.jar.JarEntry;
import java.util.jar.JarFile;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.condition.EnabledIfSystemProperty;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.io.TempDir;

/** The jar in a stock broker: what was sent is read from the bucket after the broker lost its disk. */
@EnabledIfSystemProperty(named = "streammeta.plugin.jar", matches = ".+")
class StockBrokerTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    static final Path PLUGIN = Path.of(System.getProperty("streammeta.plugin.jar", ""));
    static final String TOPIC = "orders";
    private static final int MESSAGES = 3_000;
    private static final Duration UPLOAD = Duration.ofMinutes(3);

    @TempDir
    Path folder;

    @Test
    void everyMessageIsReadFromTheTierAfterTheDiskIsLost() throws Exception {
        Map<String, String> options =
                options(folder, String.join(",", CONTROLLERS.endpoints()), CONTROLLERS.bucket());
        try (StockBroker broker = new StockBroker(folder, PLUGIN, options)) {
            StockClient client = new StockClient(broker.nameServerAddress(), TOPIC);
            List<String> bodies = bodies();
            client.send(bodies.subList(0, MESSAGES / 3));
            waitForParts();
            broker.kill(); // in the middle of its first uploads
            broker.start();
            int leader = leader();
            CompletableFuture<Void> killed = CompletableFuture.runAsync(() -> CONTROLLERS.kill(leader));
            client.send(bodies.subList(MESSAGES / 3, MESSAGES));
            killed.join();
            assertEquals(new TreeSet<>(bodies), client.receive(MESSAGES));
            CONTROLLERS.start(leader);

            loseDisk(broker);
            assertEquals(new TreeSet<>(bodies), client.receive(MESSAGES));
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

    /** Returns the options of the example, with settings of a test. */
    static Map<String, String> options(Path folder, String endpoints, String bucket) throws IOException {
        Path settings = folder.resolve("streammeta.properties");
        Files.write(settings, List.of("controllers = " + endpoints, "bucket = " + bucket, "node.id = 70"));
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

    private static List<String> bodies() {
        return IntStream.range(0, MESSAGES)
                .mapToObj(number -> "message " + number + " " + "x".repeat(number % 500))
                .toList();
    }

    /** Kills the broker, deletes its messages, and starts it again. */
    static void loseDisk(StockBroker broker) throws IOException {
        broker.kill();
        for (String lost : List.of("commitlog", "consumequeue", "index", "tiered_index_file")) {
            delete(broker.store().resolve(lost));
        }
        broker.start();
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
