package io.streammeta.testkit;

import java.io.IOException;
import java.io.UncheckedIOException;
import java.net.BindException;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.concurrent.Callable;
import java.util.concurrent.ThreadLocalRandom;

/** What tests of brokers in processes of their own need: free ports, and conditions that hold sooner or later. */
public final class Waiting {
    private static final Duration PATIENCE = Duration.ofMinutes(5);

    private Waiting() {}

    /** Returns a free port below those that systems choose, so that nothing takes it while a broker is down. */
    public static int freePort() {
        while (true) {
            int port = ThreadLocalRandom.current().nextInt(12_000, 30_000);
            try (ServerSocket socket = new ServerSocket(port)) {
                return socket.getLocalPort();
            } catch (BindException taken) {
                continue;
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    }

    /** Waits until a condition holds. An exception means that it does not hold yet. */
    public static void until(String what, Callable<Boolean> condition) throws InterruptedException {
        Exception last = null;
        for (long end = System.nanoTime() + PATIENCE.toNanos(); System.nanoTime() < end; Thread.sleep(200)) {
            try {
                if (condition.call()) {
                    return;
                }
            } catch (InterruptedException error) {
                throw error;
            } catch (Exception notYet) { // of a broker that starts or ends
                last = notYet;
            }
        }
        throw new AssertionError("not within " + PATIENCE + ": " + what, last);
    }
}
