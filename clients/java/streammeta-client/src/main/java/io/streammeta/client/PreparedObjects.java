package io.streammeta.client;

import java.util.List;
import java.util.stream.LongStream;

/**
 * Consecutive object ids, issued to a writer.
 *
 * @param firstObjectId the first id
 * @param count the number of ids
 * @param deadlineMs uncommitted objects expire after this time, in ms since 1970, by the leader's clock
 */
public record PreparedObjects(long firstObjectId, int count, long deadlineMs) {
    /** Returns the ids. */
    public List<Long> ids() {
        return LongStream.range(firstObjectId, firstObjectId + count).boxed().toList();
    }
}
