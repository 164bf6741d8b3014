package io.streammeta.pulsar;

import io.streammeta.testkit.Waiting;
import java.io.File;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.TimeUnit;
import java.util.stream.Collectors;
import org.apache.pulsar.client.admin.PulsarAdmin;

/** A stock broker in standalone mode, in a process of its own. Its folder has all its data. */
final class Standalone implements AutoCloseable {
    private final Path folder;
    private final int brokerPort = Waiting.freePort();
    private final int webPort = Waiting.freePort();
    private final int bookiePort = Waiting.freePort();
    private Process process;

    /** Prepares a folder with the example's configuration, some options of a test, and the archive. */
    Standalone(Path folder, Path archive, Properties options) throws IOException {
        this.folder = folder;
        Path offloaders = Files.createDirectories(folder.resolve("offloaders"));
        Files.copy(archive, offloaders.resolve(archive.getFileName()));
        Properties all = new Properties();
        try (var example = Files.newInputStream(Path.of("example/standalone.conf"))) {
            all.load(example);
        }
        all.putAll(options);
        all.setProperty("brokerServicePort", Integer.toString(brokerPort));
        all.setProperty("webServicePort", Integer.toString(webPort));
        all.setProperty("offloadersDirectory", offloaders.toString());
        all.setProperty("narExtractionDirectory", folder.resolve("nars").toString());
        // A small bookie.
        all.setProperty("dbStorage_writeCacheMaxSizeMb", "16");
        all.setProperty("dbStorage_readAheadCacheMaxSizeMb", "16");
        all.setProperty("dbStorage_rocksDB_blockCacheSize", "4194304");
        all.setProperty("managedLedgerCacheSizeMB", "32");
        all.setProperty("diskUsageThreshold", "0.99");
        all.setProperty("diskUsageWarnThreshold", "0.99");
        try (var out = Files.newOutputStream(folder.resolve("standalone.conf"))) {
            all.store(out, null);
        }
    }

    void start() throws IOException, InterruptedException {
        String classPath = System.getProperty("surefire.test.class.path", System.getProperty("java.class.path"));
        // The broker has the offloader from its archive alone.
        String ofBroker = Arrays.stream(classPath.split(File.pathSeparator))
                .filter(entry -> entry.endsWith(".jar") && !Path.of(entry).getFileName().toString().startsWith("streammeta-"))
                .collect(Collectors.joining(File.pathSeparator));
        List<String> command = new ArrayList<>(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                "-Xmx768m",
                "-XX:MaxDirectMemorySize=384m",
                "-XX:+UseSerialGC",
                "-XX:TieredStopAtLevel=1",
                "-Dio.netty.tryReflectionSetAccessible=true"));
        for (String opened : List.of(
                "java.base/java.lang", "java.base/java.nio", "java.base/jdk.internal.misc", "java.base/java.util.zip",
                "java.base/jdk.internal.platform", "java.management/sun.management")) {
            command.addAll(List.of("--add-opens", opened + "=ALL-UNNAMED"));
        }
        command.addAll(List.of(
                "org.apache.pulsar.PulsarStandaloneStarter",
                "--config", folder.resolve("standalone.conf").toString(),
                "--metadata-dir", folder.resolve("metadata").toString(),
                "--bookkeeper-dir", folder.resolve("bookkeeper").toString(),
                "--bookkeeper-port", Integer.toString(bookiePort),
                "--advertised-address", "127.0.0.1",
                "--no-functions-worker",
                "--no-stream-storage"));
        ProcessBuilder builder = new ProcessBuilder(command)
                .directory(folder.toFile())
                .redirectErrorStream(true)
                .redirectOutput(ProcessBuilder.Redirect.appendTo(log().toFile()));
        builder.environment().put("CLASSPATH", ofBroker);
        process = builder.start();
        waitUntilReady();
    }

    private void waitUntilReady() throws IOException, InterruptedException {
        try (PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(webAddress()).build()) {
            for (long until = System.nanoTime() + TimeUnit.MINUTES.toNanos(5); System.nanoTime() < until; ) {
                if (!process.isAlive()) {
                    break;
                }
                try {
                    if (admin.namespaces().getNamespaces("public").contains("public/default")) {
                        return;
                    }
                } catch (Exception notYet) {
                    // The web server or the namespace does not exist yet.
                }
                Thread.sleep(500);
            }
        }
        String log = Files.readString(log());
        throw new IOException("the broker did not start: " + log.substring(Math.max(0, log.length() - 6000)));
    }

    String webAddress() {
        return "http://127.0.0.1:" + webPort;
    }

    String address() {
        return "pulsar://127.0.0.1:" + brokerPort;
    }

    Path log() {
        return folder.resolve("broker.log");
    }

    /** Kills the process, as {@code kill -9} does. */
    void kill() {
        process.destroyForcibly().onExit().join();
    }

    @Override
    public void close() {
        if (process != null) {
            kill();
        }
    }
}
