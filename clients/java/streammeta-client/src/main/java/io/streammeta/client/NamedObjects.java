package io.streammeta.client;

import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.DescribeNamedObjectsRequest;
import java.util.Collection;
import java.util.List;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/** Descriptions of named objects. {@link NodeNamedObjects} commits and deletes them. */
public final class NamedObjects {
    private final Calls calls;

    NamedObjects(Calls calls) {
        this.calls = calls;
    }

    /** Describes the object of a name, empty for an unknown name. */
    public CompletableFuture<Optional<NamedObject>> describe(String name) {
        return describe(List.of(name)).thenApply(found -> found.stream().findFirst());
    }

    /** Describes the objects of names, in name order, without unknown ones. */
    public CompletableFuture<List<NamedObject>> describe(Collection<String> names) {
        if (names.isEmpty()) { // means all objects in the contract
            return CompletableFuture.completedFuture(List.of());
        }
        return pages(DescribeNamedObjectsRequest.newBuilder().addAllNames(names)).toList();
    }

    /** Lists the objects whose names begin with a prefix, in name order. The prefix may be empty. */
    public Pages<NamedObject> list(String prefix) {
        return pages(DescribeNamedObjectsRequest.newBuilder().setPrefix(prefix));
    }

    private Pages<NamedObject> pages(DescribeNamedObjectsRequest.Builder builder) {
        DescribeNamedObjectsRequest request = builder.build();
        return new Pages<>(token -> calls.call(
                        Methods.DESCRIBE_NAMED_OBJECTS,
                        request.toBuilder().setPage(Wire.page(token)).build())
                .thenApply(answer -> new Page<>(
                        answer.getObjectsList().stream().map(NamedObject::of).toList(),
                        answer.getNextPageToken())));
    }
}
