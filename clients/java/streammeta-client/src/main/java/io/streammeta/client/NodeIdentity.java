package io.streammeta.client;

/**
 * A node and the process that speaks for it. It fences every call that changes something.
 *
 * @param nodeId the broker's id, 0 or more
 * @param nodeEpoch a number that grows with each start of the process, such as its start time in ms
 */
public record NodeIdentity(int nodeId, long nodeEpoch) {
    io.streammeta.v1.NodeIdentity toWire() {
        return io.streammeta.v1.NodeIdentity.newBuilder()
                .setNodeId(nodeId)
                .setNodeEpoch(nodeEpoch)
                .build();
    }

    static NodeIdentity of(io.streammeta.v1.NodeIdentity node) {
        return new NodeIdentity(node.getNodeId(), node.getNodeEpoch());
    }
}
