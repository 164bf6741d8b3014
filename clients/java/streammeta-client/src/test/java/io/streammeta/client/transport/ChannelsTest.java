package io.streammeta.client.transport;

import static org.junit.jupiter.api.Assertions.assertNotSame;
import static org.junit.jupiter.api.Assertions.assertSame;

import io.grpc.ConnectivityState;
import io.grpc.ManagedChannel;
import java.net.InetAddress;
import java.net.ServerSocket;
import java.time.Duration;
import java.util.concurrent.Executors;
import org.junit.jupiter.api.Test;

class ChannelsTest {
    private static final Duration CONNECT = Duration.ofMillis(300);

    @Test
    void aConnectionHasMoreTimeAfterOneThatWasGivenUp() throws Exception {
        var timer = Executors.newSingleThreadScheduledExecutor();
        Channels channels = new Channels(null, timer, CONNECT);
        // The system accepts connections, and nothing answers them.
        try (ServerSocket silent = new ServerSocket(0, 50, InetAddress.getLoopbackAddress())) {
            String endpoint = "127.0.0.1:" + silent.getLocalPort();
            ManagedChannel first = connecting(channels, endpoint);
            Thread.sleep(CONNECT.plusMillis(100).toMillis());
            channels.dropBroken(endpoint);
            ManagedChannel second = connecting(channels, endpoint);
            assertNotSame(first, second);

            Thread.sleep(CONNECT.plusMillis(100).toMillis());
            channels.dropBroken(endpoint);
            assertSame(second, channels.get(endpoint));
        } finally {
            channels.close();
            timer.shutdown();
        }
    }

    private static ManagedChannel connecting(Channels channels, String endpoint) throws InterruptedException {
        ManagedChannel channel = channels.get(endpoint);
        while (channel.getState(true) != ConnectivityState.CONNECTING) {
            Thread.sleep(5);
        }
        return channel;
    }
}
