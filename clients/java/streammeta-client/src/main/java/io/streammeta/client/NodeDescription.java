package io.streammeta.client;

import java.util.Map;
import java.util.OptionalInt;

/**
 * A node, as the leader knows it.
 *
 * @param identity the node and the epoch of its newest process
 * @param state the state of its session
 * @param isFailover whether another node recovers its data
 * @param walConfig where its write-ahead log is, as registered
 * @param tags the labels, by key
 * @param hasOpenStreams whether at least one open stream has its current range here
 * @param streamSetObjectCount the number of its stream set objects
 * @param isLocked whether only the node itself may open streams that it owned last
 * @param pendingUploadCount the number of pending uploads after fast closes
 * @param recoveredBy the node that recovers its data, empty for none
 * @param isDeparted whether it has unregistered
 */
public record NodeDescription(
        NodeIdentity identity,
        State state,
        boolean isFailover,
        String walConfig,
        Map<String, String> tags,
        boolean hasOpenStreams,
        long streamSetObjectCount,
        boolean isLocked,
        long pendingUploadCount,
        OptionalInt recoveredBy,
        boolean isDeparted) {

    /** State of a node's session. */
    public enum State {
        /** Heartbeats arrive. */
        ACTIVE,
        /** Its session ended, or it is being recovered. */
        FENCED,
        /** It shuts down regularly. */
        CONTROLLED_SHUTDOWN,
        /** This leader has seen no session yet. */
        UNKNOWN
    }

    static NodeDescription of(io.streammeta.v1.NodeDescription node) {
        return new NodeDescription(
                new NodeIdentity(node.getNodeId(), node.getNodeEpoch()),
                switch (node.getState()) {
                    case NODE_STATE_ACTIVE -> State.ACTIVE;
                    case NODE_STATE_FENCED -> State.FENCED;
                    case NODE_STATE_CONTROLLED_SHUTDOWN -> State.CONTROLLED_SHUTDOWN;
                    default -> State.UNKNOWN;
                },
                node.getFailover(),
                node.getWalConfig(),
                Wire.tags(node.getTagsList()),
                node.getHasOpeningStreams(),
                node.getStreamSetObjectCount(),
                node.getLocked(),
                node.getPendingUploadCount(),
                Wire.optional(node.hasRecoveredBy(), node.getRecoveredBy()),
                node.getDeparted());
    }
}
