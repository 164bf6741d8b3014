package io.streammeta.testkit;

import java.util.function.Predicate;

/** A broker with a plug-in in a fault run, {@code scripts/chaos --plugin}. It runs when it is made. */
public interface FaultyBroker extends AutoCloseable {
    /** Kills a process of the broker, as {@code kill -9} does. */
    void kill() throws Exception;

    /** Starts what was killed, and returns once it can be used. */
    void start() throws Exception;

    /** Writes a message. Returning acknowledges it. */
    void write(byte[] message) throws Exception;

    /** Waits until all messages are in the bucket, and sees to it that they are read from there. */
    void settle() throws Exception;

    /** Reads the messages from the first one on, as long as the reader wants more. */
    void read(Predicate<byte[]> reader) throws Exception;
}
