package io.streammeta.client.transport;

import io.grpc.ChannelCredentials;
import io.grpc.ConnectivityState;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.TlsChannelCredentials;
import io.streammeta.client.TlsFiles;
import io.streammeta.client.errors.ClientClosedException;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.nio.file.Files;
import java.time.Duration;
import java.util.Arrays;
import java.util.HashMap;
import java.util.Map;
import java.util.concurrent.ScheduledExecutorService;
import java.util.concurrent.TimeUnit;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Connections to the controllers, one for each endpoint. With TLS the files may be replaced at any time: new calls then
 * use new connections.
 */
final class Channels {
    private static final Logger LOG = LoggerFactory.getLogger(Channels.class);
    /** Answers that a controller may send are smaller. */
    private static final int MESSAGE_BYTES_MAX = 64 << 20;
    /** Time after which a connection that is still being made is given up for a new one, for the first time. */
    private static final Duration CONNECT = Duration.ofSeconds(5);
    private static final Duration CONNECT_MAX = Duration.ofSeconds(40);
    /** Interval of looks at the files of a certificate. */
    private static final Duration LOOK = Duration.ofSeconds(1);
    /** Time that calls have left on a connection when its certificate is replaced. */
    private static final Duration GRACE = Duration.ofSeconds(10);

    private final TlsFiles tls;
    private final ScheduledExecutorService timer;
    private final Duration connect;
    private final Map<String, Opened> channels = new HashMap<>();
    /** Endpoints whose last connection was given up, with the time that the next one has. */
    private final Map<String, Duration> late = new HashMap<>();

    /** A connection, made at the first call. */
    private record Opened(ManagedChannel channel, long openedAt) {}

    private byte[][] loaded;
    private long lookedAt;
    private ChannelCredentials credentials;
    private boolean isClosed;

    /** Reads the files of {@code tls}, which is null for plain text. */
    Channels(TlsFiles tls, ScheduledExecutorService timer) {
        this(tls, timer, CONNECT);
    }

    Channels(TlsFiles tls, ScheduledExecutorService timer, Duration connect) {
        this.connect = connect;
        this.tls = tls;
        this.timer = timer;
        if (tls == null) {
            credentials = InsecureChannelCredentials.create();
            return;
        }
        try {
            load(read());
        } catch (IOException error) {
            throw new IllegalArgumentException("the files of " + tls + " can't be used: " + error.getMessage(), error);
        }
    }

    synchronized ManagedChannel get(String endpoint) {
        if (isClosed) {
            throw new ClientClosedException("connection to " + endpoint);
        }
        if (tls != null) {
            lookForNewFiles();
        }
        return channels.computeIfAbsent(endpoint, name -> new Opened(connect(name), System.nanoTime()))
                .channel();
    }

    /**
     * Drops the connection of an attempt that got no answer, unless it is in use. gRPC would make the next one after a
     * growing wait of its own, but the client has waits of its own, which end when a controller is back.
     */
    synchronized void dropBroken(String endpoint) {
        Opened opened = channels.get(endpoint);
        if (opened == null) {
            return;
        }
        ConnectivityState state = opened.channel().getState(false);
        Duration limit = late.getOrDefault(endpoint, connect);
        boolean isLate = state == ConnectivityState.CONNECTING
                && System.nanoTime() - opened.openedAt() > limit.toNanos();
        if (isLate) {
            // A process with little of the processor, or a slow network, would never connect in equal times.
            late.put(endpoint, limit.multipliedBy(2).compareTo(CONNECT_MAX) < 0 ? limit.multipliedBy(2) : CONNECT_MAX);
        } else if (state == ConnectivityState.READY) {
            late.remove(endpoint);
        }
        if (isLate || state == ConnectivityState.TRANSIENT_FAILURE) {
            channels.remove(endpoint);
            opened.channel().shutdownNow();
        }
    }

    synchronized void close() {
        isClosed = true;
        channels.values().forEach(opened -> opened.channel().shutdownNow());
        channels.clear();
    }

    private ManagedChannel connect(String endpoint) {
        return Grpc.newChannelBuilder("dns:///" + endpoint, credentials)
                .maxInboundMessageSize(MESSAGE_BYTES_MAX)
                .keepAliveTime(10, TimeUnit.SECONDS)
                .keepAliveTimeout(5, TimeUnit.SECONDS)
                // The client decides about retries: it knows the other controllers.
                .disableRetry()
                .build();
    }

    private void lookForNewFiles() {
        long now = System.nanoTime();
        if (now - lookedAt < LOOK.toNanos()) {
            return;
        }
        lookedAt = now;
        try {
            byte[][] found = read();
            if (Arrays.deepEquals(found, loaded)) {
                return;
            }
            load(found);
        } catch (IOException | IllegalArgumentException error) {
            // The files may be half written: the connections that exist stay in use.
            LOG.warn("new TLS files can't be used, the earlier ones stay in use: {}", error.getMessage());
            return;
        }
        channels.values().forEach(opened -> retire(opened.channel()));
        channels.clear();
        LOG.info("TLS files were replaced, new connections use them");
    }

    private void retire(ManagedChannel channel) {
        channel.shutdown();
        // Pipelines and watches end only when they are cancelled, and continue on a new connection.
        timer.schedule(channel::shutdownNow, GRACE.toMillis(), TimeUnit.MILLISECONDS);
    }

    private byte[][] read() throws IOException {
        return new byte[][] {
            Files.readAllBytes(tls.ca()), Files.readAllBytes(tls.certificate()), Files.readAllBytes(tls.key())
        };
    }

    private void load(byte[][] files) throws IOException {
        credentials = TlsChannelCredentials.newBuilder()
                .trustManager(new ByteArrayInputStream(files[0]))
                .keyManager(new ByteArrayInputStream(files[1]), new ByteArrayInputStream(files[2]))
                .build();
        loaded = files;
        lookedAt = System.nanoTime();
    }
}
