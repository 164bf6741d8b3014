package io.streammeta.testkit;

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintWriter;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.BitSet;
import java.util.Random;
import org.junit.jupiter.api.Assumptions;

/**
 * The part of a fault run beside the broker: obeys {@code scripts/chaos --plugin}, which injects the faults.
 *
 * <p>Message N is written again until it is acknowledged, and then message N + 1. Each is made from its number alone.
 */
public final class FaultRun {
    /** A message that no run counts, such as those that fill a segment. */
    public static final byte[] FILLER = message(-1);

    private static final int MESSAGE_BYTES = 1000;
    private static final int PAUSE_MS = 3;
    private static final int RETRY_MS = 200;

    private final FaultyBroker broker;
    private volatile boolean isWriting;
    private volatile int acknowledged;
    private Thread writer = new Thread();

    private FaultRun(FaultyBroker broker) {
        this.broker = broker;
    }

    /** Where the controllers and the bucket of a run are, and the folder for a broker's files. */
    public record World(String endpoints, String bucket, Path folder) {}

    /** Starts the broker of a plug-in. */
    public interface Opener {
        /** Returns the broker once it can be used. */
        FaultyBroker open(World world) throws Exception;
    }

    /** Obeys the script at the address in {@code streammeta.faults} until it disconnects. Without one the test is skipped. */
    public static void serve(String plugin, Opener opener) throws Exception {
        String script = System.getProperty("streammeta.faults", "");
        Assumptions.assumeFalse(script.isEmpty(), "a part of scripts/chaos --plugin");
        String[] address = script.split(":");
        try (Socket socket = new Socket(address[0], Integer.parseInt(address[1]));
                var commands = new BufferedReader(new InputStreamReader(socket.getInputStream()));
                var answers = new PrintWriter(socket.getOutputStream(), true)) {
            answers.println(plugin);
            String[] world = commands.readLine().split(" ");
            Path folder = Files.createDirectories(Path.of(world[2], plugin));
            try (FaultyBroker broker = opener.open(new World(world[0], world[1], folder))) {
                FaultRun run = new FaultRun(broker);
                answers.println("ok 0");
                for (String line = commands.readLine(); line != null; line = commands.readLine()) {
                    answers.println("ok " + run.obey(line));
                }
                run.stopWriting();
            } catch (Throwable error) {
                answers.println("failed " + error.toString().replace('\n', ' '));
                throw error;
            }
        }
    }

    /** Does what a command says, and returns the number of acknowledged messages. */
    private int obey(String command) throws Exception {
        switch (command) {
            case "write" -> startWriting();
            case "stop" -> stopWriting();
            case "kill" -> broker.kill();
            case "start" -> broker.start();
            case "settle" -> broker.settle();
            case "read" -> read();
            default -> throw new IllegalArgumentException(command);
        }
        return acknowledged;
    }

    private void startWriting() {
        isWriting = true;
        writer = new Thread(this::write, "writer");
        writer.start();
    }

    private void stopWriting() throws InterruptedException {
        isWriting = false;
        writer.join();
    }

    private void write() {
        try {
            while (isWriting) {
                try {
                    broker.write(message(acknowledged));
                    acknowledged++;
                    Thread.sleep(PAUSE_MS);
                } catch (InterruptedException error) {
                    throw error;
                } catch (Exception unacknowledged) { // by a broker that was killed, for instance
                    Thread.sleep(RETRY_MS);
                }
            }
        } catch (InterruptedException error) {
            Thread.currentThread().interrupt();
        }
    }

    /** Requires that each acknowledged message is read, and that nothing else is. */
    private void read() throws Exception {
        BitSet found = new BitSet();
        broker.read(message -> {
            int number = ByteBuffer.wrap(message).getInt();
            if (!Arrays.equals(message(number), message)) {
                throw new AssertionError("wrong content of message " + number);
            }
            if (number >= 0) {
                found.set(number);
            }
            return found.nextClearBit(0) < acknowledged;
        });
        int lost = found.nextClearBit(0);
        if (lost < acknowledged) {
            throw new AssertionError("message " + lost + " of " + acknowledged + " is lost, and "
                    + (acknowledged - found.get(0, acknowledged).cardinality() - 1) + " more");
        }
    }

    private static byte[] message(int number) {
        byte[] message = new byte[MESSAGE_BYTES];
        new Random(number).nextBytes(message);
        return ByteBuffer.wrap(message).putInt(number).array();
    }
}
