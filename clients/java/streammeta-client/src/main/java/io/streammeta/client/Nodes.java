package io.streammeta.client;

import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.GetNodesRequest;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/** Descriptions of nodes. */
public final class Nodes {
    private final Calls calls;

    Nodes(Calls calls) {
        this.calls = calls;
    }

    /** Describes a node, empty if it has never registered. */
    public CompletableFuture<Optional<NodeDescription>> describe(int nodeId) {
        return calls.call(
                        Methods.GET_NODES,
                        GetNodesRequest.newBuilder().addNodeIds(nodeId).build())
                .thenApply(answer -> answer.getNodesList().stream().findFirst().map(NodeDescription::of));
    }

    /** Describes all nodes, in id order. */
    public CompletableFuture<List<NodeDescription>> describeAll() {
        return new Pages<>(token -> calls.call(
                                Methods.GET_NODES,
                                GetNodesRequest.newBuilder().setPage(Wire.page(token)).build())
                        .thenApply(answer -> new Page<>(
                                answer.getNodesList().stream().map(NodeDescription::of).toList(),
                                answer.getNextPageToken())))
                .toList();
    }
}
