package io.streammeta.client;

import io.streammeta.client.errors.RejectedException;
import java.util.Map;
import java.util.TreeMap;

/**
 * Outcome of each stream of a call, by stream id, in one of two maps. A rejected stream neither hides nor undoes the
 * others.
 *
 * @param done the results of those that succeeded
 * @param failed the errors of the others
 */
public record Outcomes<T>(Map<Long, T> done, Map<Long, RejectedException> failed) {
    /** Returns the results if nothing failed. Otherwise throws the error of the smallest id. */
    public Map<Long, T> requireAll() {
        if (!failed.isEmpty()) {
            throw new TreeMap<>(failed).firstEntry().getValue();
        }
        return done;
    }
}
