package io.streammeta.store;

import java.util.List;
import java.util.Map;

/**
 * Result of a deletion.
 *
 * @param deleted the keys that are absent now, also those that never existed
 * @param failed the reason for each key that remains
 */
public record DeleteResult(List<String> deleted, Map<String, String> failed) {
    /** Returns this result if nothing remains. Otherwise throws an error that names the first remaining key. */
    public DeleteResult requireAll() {
        failed.forEach((key, reason) -> {
            throw new StoreUnavailableException(
                    "object '" + key + "' and " + (failed.size() - 1) + " others could not be deleted: " + reason
                            + ". Delete them again",
                    null);
        });
        return this;
    }
}
