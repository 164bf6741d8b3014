package io.streammeta.client;

import io.streammeta.client.errors.StreammetaException;
import java.util.List;

/** Callbacks of a session, on its heartbeat's thread: they must not block for long. */
public interface SessionListener {
    /** A listener that does nothing. */
    SessionListener NONE = new SessionListener() {};

    /**
     * Reports the work of the last heartbeat, whenever it is not empty. The same work is reported until it is done.
     *
     * @param recoveries nodes whose data this session has to recover
     * @param compactions dead nodes whose stream set objects it has to compact in their name
     */
    default void onAssigned(List<Recovery> recoveries, List<NodeIdentity> compactions) {}

    /** Reports that another process or node replaces this one. There are no more heartbeats: stop writing. */
    default void onTakenOver(StreammetaException error) {}
}
