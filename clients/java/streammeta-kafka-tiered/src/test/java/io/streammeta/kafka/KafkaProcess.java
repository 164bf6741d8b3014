package io.streammeta.kafka;

import io.streammeta.testkit.ReleasedBroker;
import io.streammeta.testkit.Waiting;
import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;

/** A stock Kafka broker in a process of its own, which loads the released jar as the example's configuration says. */
final class KafkaProcess implements AutoCloseable {
    private static final Path MODULE =
            Path.of(System.getProperty("streammeta.repository"), "clients/java/streammeta-kafka-tiered");
    private static final Path EXAMPLE = MODULE.resolve("example/server.properties");
    private static final Path BROKER = MODULE.resolve("src/test/broker/pom.xml");
    private static final String CLUSTER_ID = "AAAAAAAAAAAAAAAAAAAAAQ";

    private final int nodeId;
    private final int port;
    private final Path folder;
    private final Properties config = new Properties();
    private final String classPath;
    private Process process;

    /** The broker with id 1 is the Kafka controller, too. */
    KafkaProcess(int nodeId, int controllerPort, String endpoints, String bucket, Path folder) throws IOException {
        this.nodeId = nodeId;
        this.port = Waiting.freePort();
        this.folder = Files.createDirectories(folder);
        // Only Kafka: the plug-in and what it needs are in the jar.
        String version = "kafka.version=" + System.getProperty("broker.version");
        this.classPath = ReleasedBroker.classPath(BROKER, version, folder);
        String jar = Path.of(System.getProperty("plugin.jar")).toRealPath().toString();
        try (InputStream example = Files.newInputStream(EXAMPLE)) {
            config.load(example);
        }
        config.replaceAll((name, value) -> name.toString().endsWith(".class.path")
                ? jar
                : name.toString().endsWith(".endpoints") ? endpoints : value);
        config.setProperty("rsm.config.bucket", bucket);

        boolean isController = nodeId == 1;
        String listener = "PLAINTEXT://127.0.0.1:" + port;
        set("node.id", nodeId);
        set("process.roles", isController ? "broker,controller" : "broker");
        set("controller.quorum.voters", "1@127.0.0.1:" + controllerPort);
        set("controller.listener.names", "CONTROLLER");
        set("listeners", isController ? listener + ",CONTROLLER://127.0.0.1:" + controllerPort : listener);
        set("advertised.listeners", listener);
        set("listener.security.protocol.map", "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT");
        set("log.dirs", folder.resolve("logs"));
        set("offsets.topic.replication.factor", 1);
        set("offsets.topic.num.partitions", 1);
        set("remote.log.manager.task.interval.ms", 500);
        set("log.retention.check.interval.ms", 500);
        set("log.initial.task.delay.ms", 500);
        set("group.initial.rebalance.delay.ms", 0);
        // Not 2 s: a busy machine is slow to start two brokers.
        set("controller.quorum.fetch.timeout.ms", 20_000);
        set("controller.quorum.request.timeout.ms", 20_000);
    }

    private void set(String name, Object value) {
        config.setProperty(name, value.toString());
    }

    String address() {
        return "127.0.0.1:" + port;
    }

    /** Formats the log directory, unless it is, and starts the broker. */
    void start() throws Exception {
        Path file = folder.resolve("server.properties");
        try (OutputStream output = Files.newOutputStream(file)) {
            config.store(output, null);
        }
        int formatted = java("kafka.tools.StorageTool", "format", "--ignore-formatted", "-t", CLUSTER_ID, "-c", file)
                .waitFor();
        if (formatted != 0) {
            throw new IOException("format failed: " + log());
        }
        process = java("kafka.Kafka", file);
    }

    private Process java(Object... arguments) throws IOException {
        List<String> command = new ArrayList<>(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                "-Xmx384m",
                "-XX:TieredStopAtLevel=1", // starts with less of the processor
                "-XX:+UseSerialGC",
                "-cp",
                classPath));
        Stream.of(arguments).map(Object::toString).forEach(command::add);
        Process started = new ProcessBuilder(command)
                .redirectErrorStream(true)
                .redirectOutput(ProcessBuilder.Redirect.appendTo(folder.resolve("kafka.log").toFile()))
                .start();
        Runtime.getRuntime().addShutdownHook(new Thread(started::destroyForcibly));
        return started;
    }

    String log() throws IOException {
        return Files.readString(folder.resolve("kafka.log"));
    }

    /** Kills the broker as {@code kill -9} does. */
    void kill() throws InterruptedException {
        process.destroyForcibly().waitFor();
    }

    void deleteLocalFiles() throws IOException {
        try (Stream<Path> files = Files.walk(folder.resolve("logs"))) {
            for (Path path : files.sorted(Comparator.reverseOrder()).toList()) {
                Files.delete(path);
            }
        }
    }

    @Override
    public void close() throws Exception {
        if (process != null) {
            process.destroy();
            if (!process.waitFor(20, TimeUnit.SECONDS)) {
                kill();
            }
        }
    }

    @Override
    public String toString() {
        return "broker " + nodeId;
    }
}
