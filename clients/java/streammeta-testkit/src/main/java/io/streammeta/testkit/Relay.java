package io.streammeta.testkit;

import java.io.IOException;
import java.io.InputStream;
import java.io.OutputStream;
import java.io.UncheckedIOException;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.ServerSocket;
import java.net.Socket;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/** A TCP relay on loopback whose connections can be cut, and whose bytes can be held back. */
public final class Relay implements AutoCloseable {
    private final ServerSocket listener;
    private final Set<Socket> sockets = ConcurrentHashMap.newKeySet();
    private volatile InetSocketAddress target;
    private volatile boolean isCut;
    private volatile boolean isHeld;

    /** Listens on a free port. Connections wait until a target is known. */
    public Relay() {
        try {
            listener = new ServerSocket(0, 50, InetAddress.getLoopbackAddress());
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        start("accept", this::accept);
    }

    /** Returns the address to connect to, HOST:PORT. */
    public String endpoint() {
        return "127.0.0.1:" + listener.getLocalPort();
    }

    /** Forwards new connections to an address, HOST:PORT. */
    public void forwardTo(String endpoint) {
        String[] parts = endpoint.split(":");
        target = new InetSocketAddress(parts[0], Integer.parseInt(parts[1]));
    }

    /** Resets all connections, and every new one until {@link #heal}. */
    public void cut() {
        isCut = true;
        resetAll();
    }

    /** Resets all connections once. New ones are forwarded. */
    public void resetAll() {
        sockets.forEach(Relay::reset);
    }

    /** Holds all bytes back until {@link #heal}. They arrive then. */
    public void hold() {
        isHeld = true;
    }

    /** Ends all faults. */
    public synchronized void heal() {
        isCut = false;
        isHeld = false;
        notifyAll();
    }

    @Override
    public void close() {
        heal();
        try {
            listener.close();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
        resetAll();
    }

    private void accept() {
        while (!listener.isClosed()) {
            try {
                forward(listener.accept());
            } catch (IOException error) {
                continue; // the relay is closed, or its client is gone
            }
        }
    }

    private void forward(Socket client) {
        if (isCut || target == null) {
            reset(client);
            return;
        }
        Socket server = new Socket();
        sockets.add(client);
        sockets.add(server);
        try {
            server.connect(target, 2000);
        } catch (IOException error) {
            reset(client); // the target does not run
            return;
        }
        start("there", () -> copy(client, server));
        start("back", () -> copy(server, client));
    }

    private void copy(Socket from, Socket to) {
        try {
            InputStream in = from.getInputStream();
            OutputStream out = to.getOutputStream();
            byte[] buffer = new byte[64 * 1024];
            for (int count = in.read(buffer); count >= 0; count = in.read(buffer)) {
                waitWhileHeld();
                out.write(buffer, 0, count);
                out.flush();
            }
            to.shutdownOutput();
        } catch (IOException | InterruptedException error) {
            reset(from);
            reset(to);
        } finally {
            sockets.remove(from);
        }
    }

    private synchronized void waitWhileHeld() throws InterruptedException {
        while (isHeld) {
            wait();
        }
    }

    private static void reset(Socket socket) {
        try {
            socket.setSoLinger(true, 0); // the peer sees a reset, not an orderly end
            socket.close();
        } catch (IOException error) {
            // It is closed already.
            return;
        }
    }

    private static void start(String name, Runnable task) {
        Thread thread = new Thread(task, "relay-" + name);
        thread.setDaemon(true);
        thread.start();
    }
}
