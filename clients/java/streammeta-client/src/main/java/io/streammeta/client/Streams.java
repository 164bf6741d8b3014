package io.streammeta.client;

import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.DescribeStreamsRequest;
import io.streammeta.v1.FindStreamsRequest;
import java.util.Arrays;
import java.util.Collection;
import java.util.EnumSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.concurrent.CompletableFuture;

/** Descriptions of streams. {@link NodeStreams} changes them. */
public final class Streams {
    /** What a description has besides the stream itself. */
    public enum Include {
        /** The intervals of ownership. */
        RANGES,
        /** The stream objects. */
        STREAM_OBJECTS
    }

    private final Calls calls;

    Streams(Calls calls) {
        this.calls = calls;
    }

    /** Describes a stream, empty if it does not exist. */
    public CompletableFuture<Optional<StreamDescription>> describe(long streamId, Include... include) {
        DescribeStreamsRequest request = request(include).addStreamIds(streamId).build();
        return calls.call(Methods.DESCRIBE_STREAMS, request)
                .thenApply(answer -> answer.getStreamsList().stream().findFirst().map(StreamDescription::of));
    }

    /** Describes streams in id order, without unknown ones. */
    public Pages<StreamDescription> describe(Collection<Long> streamIds, Include... include) {
        // No id means all streams in the contract.
        return streamIds.isEmpty()
                ? new Pages<>(token -> CompletableFuture.completedFuture(new Page<>(List.of(), "")))
                : describe(request(include).addAllStreamIds(streamIds));
    }

    /** Describes all streams in id order. */
    public Pages<StreamDescription> describeAll(Include... include) {
        return describe(request(include));
    }

    /** Describes the streams whose current range is on a node, in id order. */
    public Pages<StreamDescription> describeOf(int nodeId, Include... include) {
        return describe(request(include).setOwnerNodeId(nodeId));
    }

    /** Finds the streams that have all of these tags, in id order. */
    public Pages<StreamDescription> find(Map<String, String> tags) {
        return find(FindStreamsRequest.newBuilder().addAllTags(Wire.tags(tags)));
    }

    /** Finds the streams that have all of these tags and whose current range is on a node, in id order. */
    public Pages<StreamDescription> findOf(int nodeId, Map<String, String> tags) {
        return find(FindStreamsRequest.newBuilder().addAllTags(Wire.tags(tags)).setOwnerNodeId(nodeId));
    }

    private Pages<StreamDescription> find(FindStreamsRequest.Builder builder) {
        FindStreamsRequest request = builder.build();
        return new Pages<>(token -> calls.call(
                        Methods.FIND_STREAMS, request.toBuilder().setPage(Wire.page(token)).build())
                .thenApply(answer -> new Page<>(
                        answer.getStreamsList().stream().map(StreamDescription::of).toList(),
                        answer.getNextPageToken())));
    }

    private Pages<StreamDescription> describe(DescribeStreamsRequest.Builder builder) {
        DescribeStreamsRequest request = builder.build();
        return new Pages<>(token -> calls.call(
                        Methods.DESCRIBE_STREAMS,
                        request.toBuilder().setPage(Wire.page(token)).build())
                .thenApply(answer -> new Page<>(
                        answer.getStreamsList().stream().map(StreamDescription::of).toList(),
                        answer.getNextPageToken())));
    }

    private static DescribeStreamsRequest.Builder request(Include... include) {
        EnumSet<Include> wanted = EnumSet.noneOf(Include.class);
        wanted.addAll(Arrays.asList(include));
        return DescribeStreamsRequest.newBuilder()
                .setIncludeRanges(wanted.contains(Include.RANGES))
                .setIncludeStreamObjects(wanted.contains(Include.STREAM_OBJECTS));
    }
}
