package io.streammeta.rocketmq;

import io.streammeta.testkit.ReleasedBroker;
import io.streammeta.testkit.Waiting;
import java.io.File;
import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.Socket;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;

/** A name server and a broker of RocketMQ from Maven Central, as child processes with their own dependencies. */
final class StockBroker implements AutoCloseable {
    private static final Duration START = Duration.ofMinutes(5);

    private final Path folder;
    private final String stock;
    private final Path plugin;
    private final int namePort = Waiting.freePort();
    /** The broker also listens two ports below. */
    private final int brokerPort = Waiting.freePort();
    private final Process nameServer;
    private Process broker;

    /** Starts a name server, and a broker with the plug-in and options. */
    StockBroker(Path folder, Path plugin, Map<String, String> options) {
        this.folder = folder;
        this.plugin = plugin;
        this.stock = ReleasedBroker.classPath(
                Path.of("src/test/broker/pom.xml"),
                "rocketmq.version=" + System.getProperty("rocketmq.version"),
                folder);
        write("namesrv.conf", Map.of("listenPort", String.valueOf(namePort)), Map.of());
        write(
                "broker.conf",
                Map.of(
                        "namesrvAddr", nameServerAddress(),
                        "listenPort", String.valueOf(brokerPort),
                        "haListenPort", String.valueOf(Waiting.freePort()),
                        "brokerIP1", "127.0.0.1",
                        "brokerIP2", "127.0.0.1",
                        "storePathRootDir", store().toString(),
                        "mappedFileSizeCommitLog", String.valueOf(64 << 20),
                        "timerWheelEnable", "false"),
                options);
        nameServer = launch("namesrv", stock, "org.apache.rocketmq.namesrv.NamesrvStartup", "-Xmx128m");
        waitForPort(namePort, nameServer, "namesrv");
        start();
    }

    /** Starts the broker. */
    void start() {
        // The plug-in comes last: everything that it brings along has to be its own.
        String path = stock + File.pathSeparator + plugin;
        broker = launch("broker", path, "org.apache.rocketmq.broker.BrokerStartup", "-Xmx400m");
        waitForPort(brokerPort, broker, "broker");
    }

    /** Kills the broker, as {@code kill -9} does. */
    void kill() {
        end(broker.destroyForcibly());
    }

    String nameServerAddress() {
        return "127.0.0.1:" + namePort;
    }

    Path store() {
        return folder.resolve("store");
    }

    /** Returns what the broker printed and logged about its tier. */
    String log() {
        try {
            Path tiered = folder.resolve("logs/rocketmqlogs/tiered_store.log");
            return Files.readString(folder.resolve("broker.log"))
                    + (Files.exists(tiered) ? Files.readString(tiered) : "");
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    @Override
    public void close() {
        kill();
        end(nameServer.destroyForcibly());
    }

    private Process launch(String name, String path, String main, String heap) {
        List<String> command = new ArrayList<>(List.of(
                Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                heap,
                "-XX:TieredStopAtLevel=1", // starts with less of the processor
                "-XX:+UseSerialGC",
                "-XX:MaxDirectMemorySize=512m",
                "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
                "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
                "--add-opens=java.base/java.nio=ALL-UNNAMED",
                "-Duser.home=" + folder,
                "-Drocketmq.home.dir=" + folder,
                "-cp",
                path,
                main,
                "-c",
                folder.resolve(name + ".conf").toString()));
        ProcessBuilder builder = new ProcessBuilder(command)
                .redirectErrorStream(true)
                .redirectOutput(ProcessBuilder.Redirect.appendTo(folder.resolve(name + ".log").toFile()));
        builder.environment().put("ROCKETMQ_HOME", folder.toString());
        try {
            return builder.start();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private void waitForPort(int port, Process process, String name) {
        long end = System.nanoTime() + START.toNanos();
        while (process.isAlive() && System.nanoTime() < end) {
            try {
                new Socket("127.0.0.1", port).close();
                return;
            } catch (IOException notYet) {
                pause();
            }
        }
        throw new IllegalStateException(name + " did not start, see " + folder.resolve(name + ".log"));
    }

    private void write(String file, Map<String, String> settings, Map<String, String> options) {
        List<String> lines = new ArrayList<>();
        settings.forEach((option, value) -> lines.add(option + "=" + value));
        options.forEach((option, value) -> lines.add(option + "=" + value));
        try {
            Files.write(folder.resolve(file), lines);
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    private static int end(Process process) {
        try {
            if (!process.waitFor(3, TimeUnit.MINUTES)) {
                process.destroyForcibly();
                throw new IllegalStateException("process " + process.pid() + " did not end, and was killed");
            }
            return process.exitValue();
        } catch (InterruptedException error) {
            process.destroyForcibly();
            Thread.currentThread().interrupt();
            throw new IllegalStateException(error);
        }
    }

    private static void pause() {
        try {
            Thread.sleep(100);
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
            throw new IllegalStateException(error);
        }
    }
}
