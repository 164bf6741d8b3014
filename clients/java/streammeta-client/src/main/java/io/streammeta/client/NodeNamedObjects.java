package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.CommitNamedObjectsRequest;
import io.streammeta.v1.DeleteNamedObjectsRequest;
import java.util.Collection;
import java.util.List;
import java.util.concurrent.CompletableFuture;

/** Named objects, as a node commits and deletes them. */
public final class NodeNamedObjects {
    private final Calls calls;
    private final NodeIdentity node;

    NodeNamedObjects(Calls calls, NodeIdentity node) {
        this.calls = calls;
        this.node = node;
    }

    /**
     * Names prepared objects, at most 1000, all or none. Fails with the error of the first one that is rejected:
     * {@link io.streammeta.client.errors.KeyConflictException} for a name in use,
     * {@link io.streammeta.client.errors.KeyNotFoundException} or
     * {@link io.streammeta.client.errors.StreamNotFoundException} for an owner that does not exist.
     */
    public CompletableFuture<Void> commit(List<NamedObjectToCommit> objects) {
        CommitNamedObjectsRequest request = CommitNamedObjectsRequest.newBuilder()
                .setNode(node.toWire())
                .addAllObjects(objects.stream().map(NamedObjectToCommit::toWire).toList())
                .build();
        return calls.call(Methods.COMMIT_NAMED_OBJECTS, request).thenAccept(answer -> {
            Wire.checkRows("CommitNamedObjects", objects.size(), answer.getErrorsCount());
            for (int row = 0; row < objects.size(); row++) {
                Wire.check(answer.getErrors(row), "named object '" + objects.get(row).name() + "'");
            }
        });
    }

    /** Removes names, at most 1000, and destroys their objects. Unknown names are ignored. */
    public CompletableFuture<Void> delete(Collection<String> names) {
        List<String> ordered = List.copyOf(names);
        DeleteNamedObjectsRequest.Builder request =
                DeleteNamedObjectsRequest.newBuilder().setNode(node.toWire());
        ordered.forEach(name -> request.addObjectsBuilder().setName(name));
        return calls.call(Methods.DELETE_NAMED_OBJECTS, request.build()).thenAccept(answer -> {
            Wire.checkRows("DeleteNamedObjects", ordered.size(), answer.getErrorsCount());
            for (int row = 0; row < ordered.size(); row++) {
                // A repeat after the first attempt took effect finds nothing.
                if (Wire.code(answer.getErrors(row)) != ErrorCode.OBJECT_NOT_EXIST) {
                    Wire.check(answer.getErrors(row), "named object '" + ordered.get(row) + "'");
                }
            }
        });
    }
}
