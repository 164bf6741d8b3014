package io.streammeta.client;

import java.util.List;

/**
 * A page of a listing.
 *
 * @param items the items, in the order of the listing. There may be none although other pages follow
 * @param nextToken the token of the next page, empty on the last one
 */
public record Page<T>(List<T> items, String nextToken) {
    /** Returns whether no page follows. */
    public boolean isLast() {
        return nextToken.isEmpty();
    }
}
