package io.streammeta.client;

import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.CheckObjectsRequest;
import io.streammeta.v1.DescribeObjectsRequest;
import io.streammeta.v1.GetObjectsRequest;
import io.streammeta.v1.ListStreamObjectsRequest;
import io.streammeta.v1.ListStreamSetObjectsRequest;
import java.util.ArrayList;
import java.util.Collection;
import java.util.List;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;

/** Objects of all nodes: where the records of a stream are, and what the metadata knows of an id. */
public final class StoredObjects {
    private final Calls calls;

    StoredObjects(Calls calls) {
        this.calls = calls;
    }

    /** Lists the objects that contain a range of a stream, contiguous from its start. */
    public CompletableFuture<ObjectList> locate(long streamId, long startOffset, OptionalLong endOffset, int limit) {
        return locate(List.of(new ObjectQuery(streamId, startOffset, endOffset, limit)))
                .thenApply(lists -> lists.get(0));
    }

    /** Lists the objects of several ranges, in the same order. An error concerns its own query alone. */
    public CompletableFuture<List<ObjectList>> locate(List<ObjectQuery> queries) {
        return locateRest(queries, new ArrayList<>());
    }

    private CompletableFuture<List<ObjectList>> locateRest(List<ObjectQuery> queries, List<ObjectList> found) {
        if (queries.isEmpty()) {
            return CompletableFuture.completedFuture(found);
        }
        GetObjectsRequest request = GetObjectsRequest.newBuilder()
                .addAllQueries(queries.stream().map(ObjectQuery::toWire).toList())
                .setMayStop(true)
                .build();
        return calls.call(Methods.GET_OBJECTS, request).thenCompose(answer -> {
            // A large answer may end early. At least one query is answered.
            int answered = Math.max(1, answer.getResultsCount());
            answer.getResultsList().forEach(list -> found.add(ObjectList.of(list)));
            return locateRest(queries.subList(answered, queries.size()), found);
        });
    }

    /** Describes objects in id order, without unknown ones. */
    public CompletableFuture<List<ObjectDescription>> describe(Collection<Long> objectIds) {
        if (objectIds.isEmpty()) { // means all objects in the contract
            return CompletableFuture.completedFuture(List.of());
        }
        return describe(DescribeObjectsRequest.newBuilder().addAllObjectIds(objectIds)).toList();
    }

    /** Describes all objects in id order. */
    public Pages<ObjectDescription> describeAll() {
        return describe(DescribeObjectsRequest.newBuilder());
    }

    private Pages<ObjectDescription> describe(DescribeObjectsRequest.Builder builder) {
        DescribeObjectsRequest request = builder.build();
        return new Pages<>(token -> calls.call(
                        Methods.DESCRIBE_OBJECTS,
                        request.toBuilder().setPage(Wire.page(token)).build())
                .thenApply(answer -> new Page<>(
                        answer.getObjectsList().stream().map(ObjectDescription::of).toList(),
                        answer.getNextPageToken())));
    }

    /** Returns the number of objects in the registry, in any state. */
    public CompletableFuture<Long> count() {
        DescribeObjectsRequest.Builder request = DescribeObjectsRequest.newBuilder();
        request.getPageBuilder().setPageSize(1);
        return calls.call(Methods.DESCRIBE_OBJECTS, request.build()).thenApply(answer -> answer.getTotal());
    }

    /** Returns the state of each id, in the same order. */
    public CompletableFuture<List<ObjectState>> check(List<Long> objectIds) {
        CheckObjectsRequest request =
                CheckObjectsRequest.newBuilder().addAllObjectIds(objectIds).build();
        return calls.call(Methods.CHECK_OBJECTS, request).thenApply(answer -> {
            Wire.checkRows("CheckObjects", objectIds.size(), answer.getStatesCount());
            return answer.getStatesList().stream().map(ObjectState::of).toList();
        });
    }

    /**
     * Lists the committed stream set objects of a node, in id order. Fails with
     * {@link io.streammeta.client.errors.NodeNotRegisteredException} for an unknown node.
     */
    public Pages<StreamSetObject> listStreamSetObjects(int nodeId) {
        return listStreamSetObjects(nodeId, false);
    }

    /** Lists the committed stream set objects of a node as above, each with the streams in it if they are wanted. */
    public Pages<StreamSetObject> listStreamSetObjects(int nodeId, boolean includeRanges) {
        return new Pages<>(token -> calls.call(
                        Methods.LIST_STREAM_SET_OBJECTS,
                        ListStreamSetObjectsRequest.newBuilder()
                                .setNodeId(nodeId)
                                .setIncludeRanges(includeRanges)
                                .setPage(Wire.page(token))
                                .build())
                .thenApply(answer -> {
                    Wire.check(answer.getError(), "node " + nodeId);
                    return new Page<>(
                            answer.getObjectsList().stream().map(StreamSetObject::of).toList(),
                            answer.getNextPageToken());
                }));
    }

    /**
     * Lists the stream objects and composites of a stream that overlap a range of offsets, by end offset. Fails with
     * {@link io.streammeta.client.errors.StreamNotFoundException} for an unknown stream.
     *
     * @param startOffset only objects that end above it
     * @param endOffset only objects that begin below it, empty for all
     */
    public Pages<StreamObject> listStreamObjects(long streamId, long startOffset, OptionalLong endOffset) {
        ListStreamObjectsRequest.Builder builder =
                ListStreamObjectsRequest.newBuilder().setStreamId(streamId).setStartOffset(startOffset);
        endOffset.ifPresent(builder::setEndOffset);
        ListStreamObjectsRequest request = builder.build();
        return new Pages<>(token -> calls.call(
                        Methods.LIST_STREAM_OBJECTS,
                        request.toBuilder().setPage(Wire.page(token)).build())
                .thenApply(answer -> {
                    Wire.check(answer.getError(), "stream " + streamId);
                    return new Page<>(
                            answer.getObjectsList().stream().map(StreamObject::of).toList(),
                            answer.getNextPageToken());
                }));
    }
}
