package io.streammeta.client;

import io.streammeta.v1.KVPrefix;
import io.streammeta.v1.WatchRequest;
import java.util.Collection;
import java.util.List;
import java.util.OptionalLong;
import java.util.Set;

/**
 * What a watch observes. Empty collections select everything.
 *
 * @param kinds the kinds of changes
 * @param streamIds the streams whose changes are selected, which leaves out no other kind
 * @param nodeIds the nodes whose changes are selected
 * @param keys the keys whose changes are selected, at most 64 prefixes
 * @param fromOffset where the watch begins, empty to begin with the changes after now
 */
public record WatchSelection(
        Set<EntityKind> kinds,
        Collection<Long> streamIds,
        Collection<Integer> nodeIds,
        List<KeyPrefix> keys,
        OptionalLong fromOffset) {

    /**
     * The keys of a namespace that begin with a prefix.
     *
     * @param namespace the namespace, empty for the default one
     * @param prefix the prefix, empty for all keys of the namespace
     */
    public record KeyPrefix(String namespace, String prefix) {}

    /** Returns the selection of all changes of some kinds, after now. No kind selects all of them. */
    public static WatchSelection of(EntityKind... kinds) {
        return new WatchSelection(Set.of(kinds), List.of(), List.of(), List.of(), OptionalLong.empty());
    }

    /** Returns the selection of the keys with a prefix, after now. */
    public static WatchSelection ofKeys(String namespace, String prefix) {
        return new WatchSelection(
                Set.of(EntityKind.KEY),
                List.of(),
                List.of(),
                List.of(new KeyPrefix(namespace, prefix)),
                OptionalLong.empty());
    }

    /** Returns this selection, from an offset on. */
    public WatchSelection from(long offset) {
        return new WatchSelection(kinds, streamIds, nodeIds, keys, OptionalLong.of(offset));
    }

    WatchRequest toWire() {
        WatchRequest.Builder request = WatchRequest.newBuilder()
                .addAllStreamIds(streamIds)
                .addAllNodeIds(nodeIds)
                .setTyped(true)
                // A watch that lags receives the changes of many log entries in one message.
                .setMayCombine(true);
        kinds.forEach(kind -> request.addKinds(kind.toWire()));
        keys.forEach(key -> request.addKvPrefixes(
                KVPrefix.newBuilder().setNamespace(key.namespace()).setPrefix(key.prefix())));
        return request.build();
    }
}
