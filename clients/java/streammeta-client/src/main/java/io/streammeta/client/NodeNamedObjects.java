package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.CommitNamedObjectsRequest;
import io.streammeta.v1.DeleteNamedObjectsRequest;
import io.streammeta.v1.DeleteNamedObjectsResponse;
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
        return delete(names, DeleteNamedObjectsRequest.newBuilder()).thenApply(answer -> null);
    }

    /**
     * Removes names of objects that a key owns, at most 1000, and the key together with its last object. Returns whether
     * the key was deleted. Names of other owners are ignored, like unknown ones.
     */
    public CompletableFuture<Boolean> deleteWithOwner(Collection<String> names, ObjectOwner.Key owner) {
        return delete(names, ownedBy(owner).setWithOwnerKey(true))
                .thenApply(DeleteNamedObjectsResponse::getOwnerKeyDeleted);
    }

    private CompletableFuture<DeleteNamedObjectsResponse> delete(
            Collection<String> names, DeleteNamedObjectsRequest.Builder request) {
        if (names.isEmpty()) { // means all objects of the owner in the contract
            return CompletableFuture.completedFuture(DeleteNamedObjectsResponse.getDefaultInstance());
        }
        List<String> ordered = List.copyOf(names);
        request.setNode(node.toWire());
        ordered.forEach(name -> request.addObjectsBuilder().setName(name));
        return calls.call(Methods.DELETE_NAMED_OBJECTS, request.build()).thenApply(answer -> {
            Wire.checkRows("DeleteNamedObjects", ordered.size(), answer.getErrorsCount());
            for (int row = 0; row < ordered.size(); row++) {
                // A repeat after the first attempt took effect finds nothing.
                if (Wire.code(answer.getErrors(row)) != ErrorCode.OBJECT_NOT_EXIST) {
                    Wire.check(answer.getErrors(row), "named object '" + ordered.get(row) + "'");
                }
            }
            return answer;
        });
    }

    /** Destroys all objects of an owner, however many it has, in steps of 1000. */
    public CompletableFuture<Void> deleteAllOf(ObjectOwner owner) {
        return deleteRest(ownedBy(owner).setNode(node.toWire()).build()).thenApply(answer -> null);
    }

    /**
     * Destroys all objects of a key as {@link #deleteAllOf}, and the key together with the last one. Returns whether the
     * key was deleted: one without objects stays.
     */
    public CompletableFuture<Boolean> deleteAllWithOwner(ObjectOwner.Key owner) {
        return deleteRest(ownedBy(owner).setNode(node.toWire()).setWithOwnerKey(true).build())
                .thenApply(DeleteNamedObjectsResponse::getOwnerKeyDeleted);
    }

    private CompletableFuture<DeleteNamedObjectsResponse> deleteRest(DeleteNamedObjectsRequest request) {
        return calls.call(Methods.DELETE_NAMED_OBJECTS, request).thenCompose(answer -> {
            answer.getErrorsList().forEach(error -> Wire.check(error, "deletion of the objects of an owner"));
            return answer.getRemaining() > 0 ? deleteRest(request) : CompletableFuture.completedFuture(answer);
        });
    }

    private static DeleteNamedObjectsRequest.Builder ownedBy(ObjectOwner owner) {
        DeleteNamedObjectsRequest.Builder request = DeleteNamedObjectsRequest.newBuilder();
        if (owner instanceof ObjectOwner.Stream stream) {
            request.setOwnerStreamId(stream.streamId());
        } else if (owner instanceof ObjectOwner.Key key) {
            request.getOwnerKeyBuilder().setNamespace(key.namespace()).setKey(key.key());
        }
        return request;
    }
}
