package io.streammeta.automq;

import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;

/**
 * The objects that ended most recently, bounded: at least the last {@link #LIMIT} of them. It answers without a call.
 *
 * <p>An older one counts as existing again. That is harmless: an id is never reused and the bytes under it never change,
 * so a reader of it finds either the right bytes or none.
 */
final class DestroyedObjects {
    static final int LIMIT = 100_000;

    private volatile Set<Long> recent = ConcurrentHashMap.newKeySet();
    private volatile Set<Long> older = Set.of();

    /** Adds an object. One thread at a time adds. */
    void add(long objectId) {
        if (recent.size() >= LIMIT) {
            older = recent;
            recent = ConcurrentHashMap.newKeySet();
        }
        recent.add(objectId);
    }

    boolean contains(long objectId) {
        // In this order, so that an id which moves meanwhile is found.
        return recent.contains(objectId) || older.contains(objectId);
    }
}
