package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.errors.RejectedException;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Methods;
import io.streammeta.v1.CloseStreamsRequest;
import io.streammeta.v1.CreateStreamsRequest;
import io.streammeta.v1.DeleteStreamsRequest;
import io.streammeta.v1.GetOpeningStreamsRequest;
import io.streammeta.v1.NewStream;
import io.streammeta.v1.OpenStreamsRequest;
import io.streammeta.v1.StreamToDelete;
import io.streammeta.v1.TrimStreamsRequest;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;
import java.util.function.IntFunction;

/** Streams of a node: creation, ownership, trims and deletion. A call accepts at most 10000 streams. */
public final class NodeStreams {
    private final Calls calls;
    private final Caller caller;

    NodeStreams(Calls calls, Caller caller) {
        this.calls = calls;
        this.caller = caller;
    }

    /** Creates a closed, empty stream, and returns its id. */
    public CompletableFuture<Long> create(Map<String, String> tags) {
        return create(List.of(tags)).thenApply(ids -> ids.get(0));
    }

    /** Creates a closed, empty stream for each element, all or none, and returns their ids in the same order. */
    public CompletableFuture<List<Long>> create(List<Map<String, String>> tags) {
        CreateStreamsRequest.Builder request = CreateStreamsRequest.newBuilder().setNode(caller.owner());
        tags.forEach(labels -> request.addStreams(NewStream.newBuilder().addAllTags(Wire.tags(labels))));
        return calls.call(Methods.CREATE_STREAMS, request.build()).thenApply(answer -> {
            Wire.check(answer.getError(), "creation of " + tags.size() + " streams");
            Wire.checkRows("CreateStreams", tags.size(), answer.getStreamIdsCount());
            return answer.getStreamIdsList();
        });
    }

    /** Opens a stream for this node. Fails with the error of the stream. */
    public CompletableFuture<OpenedStream> open(StreamToOpen stream) {
        return open(List.of(stream)).thenApply(outcomes -> outcomes.requireAll().get(stream.streamId()));
    }

    /** Opens streams for this node. */
    public CompletableFuture<Outcomes<OpenedStream>> open(List<StreamToOpen> streams) {
        OpenStreamsRequest.Builder request = OpenStreamsRequest.newBuilder().setNode(caller.owner());
        for (StreamToOpen stream : streams) {
            request.addStreamsBuilder()
                    .setStreamId(stream.streamId())
                    .setStreamEpoch(stream.epoch())
                    .addAllTags(Wire.tags(stream.tags()))
                    .setReopen(stream.reopen());
        }
        return calls.call(Methods.OPEN_STREAMS, request.build()).thenApply(answer -> {
            Wire.checkRows("OpenStreams", streams.size(), answer.getStreamsCount());
            return outcomes(
                    "opening",
                    streams.stream().map(StreamToOpen::streamId).toList(),
                    row -> answer.getStreams(row).getError(),
                    row -> new OpenedStream(
                            streams.get(row).streamId(),
                            streams.get(row).epoch(),
                            answer.getStreams(row).getStartOffset(),
                            answer.getStreams(row).getNextOffset()));
        });
    }

    /** Closes a stream. Fails with the error of the stream. */
    public CompletableFuture<Void> close(StreamToClose stream) {
        return close(List.of(stream)).thenAccept(Outcomes::requireAll);
    }

    /** Closes streams of this node. */
    public CompletableFuture<Outcomes<Boolean>> close(List<StreamToClose> streams) {
        CloseStreamsRequest.Builder request = CloseStreamsRequest.newBuilder().setNode(caller.owner());
        if (caller.isRecovering()) {
            request.setRecoverer(caller.self().toWire());
        }
        for (StreamToClose stream : streams) {
            var closed = request.addStreamsBuilder().setStreamId(stream.streamId()).setStreamEpoch(stream.epoch());
            stream.endOffset().ifPresent(closed::setEndOffset);
        }
        return calls.call(Methods.CLOSE_STREAMS, request.build()).thenApply(answer -> {
            Wire.checkRows("CloseStreams", streams.size(), answer.getErrorsCount());
            return outcomes(
                    "closing",
                    streams.stream().map(StreamToClose::streamId).toList(),
                    answer::getErrors,
                    row -> true);
        });
    }

    /** Moves the first visible offset of a stream forward, and returns where it is then. */
    public CompletableFuture<Long> trim(StreamToTrim stream) {
        return trim(List.of(stream)).thenApply(outcomes -> outcomes.requireAll().get(stream.streamId()));
    }

    /** Moves the first visible offsets of streams forward, and returns where they are then. */
    public CompletableFuture<Outcomes<Long>> trim(List<StreamToTrim> streams) {
        TrimStreamsRequest request = TrimStreamsRequest.newBuilder()
                .setNode(caller.owner())
                .addAllStreams(streams.stream().map(StreamToTrim::toWire).toList())
                .build();
        return calls.call(Methods.TRIM_STREAMS, request).thenApply(answer -> {
            Wire.checkRows("TrimStreams", streams.size(), answer.getErrorsCount());
            return outcomes(
                    "trimming",
                    streams.stream().map(StreamToTrim::streamId).toList(),
                    answer::getErrors,
                    answer::getStartOffsets);
        });
    }

    /**
     * Deletes a closed stream permanently, with all its data. A stream that does not exist counts as deleted.
     *
     * @param epoch the current epoch of the stream, empty if it was never opened
     */
    public CompletableFuture<Void> delete(long streamId, OptionalLong epoch) {
        return delete(Map.of(streamId, epoch)).thenAccept(Outcomes::requireAll);
    }

    /** Deletes closed streams permanently, each at its current epoch, empty if it was never opened. */
    public CompletableFuture<Outcomes<Boolean>> delete(Map<Long, OptionalLong> epochs) {
        List<Long> streamIds = epochs.keySet().stream().sorted().toList();
        DeleteStreamsRequest.Builder request = DeleteStreamsRequest.newBuilder().setNode(caller.owner());
        for (long streamId : streamIds) {
            request.addStreams(StreamToDelete.newBuilder()
                    .setStreamId(streamId)
                    // The contract writes -1 for no epoch.
                    .setStreamEpoch(epochs.get(streamId).orElse(-1)));
        }
        return calls.call(Methods.DELETE_STREAMS, request.build()).thenApply(answer -> {
            Wire.checkRows("DeleteStreams", streamIds.size(), answer.getErrorsCount());
            return outcomes("deleting", streamIds, answer::getErrors, row -> true);
        });
    }

    /**
     * Lists the streams that the node left open or with pending uploads. In a recovery it fences the node's process
     * first.
     */
    public CompletableFuture<List<OpeningStream>> listOpening() {
        GetOpeningStreamsRequest.Builder builder = GetOpeningStreamsRequest.newBuilder()
                .setNode(caller.owner())
                .setFailover(caller.isRecovering());
        if (caller.isRecovering()) {
            builder.setRecoverer(caller.self().toWire());
        }
        GetOpeningStreamsRequest request = builder.build();
        Pages<OpeningStream> pages = new Pages<>(token -> calls.call(
                        Methods.GET_OPENING_STREAMS,
                        request.toBuilder().setPage(Wire.page(token)).build())
                .thenApply(answer -> {
                    Wire.check(answer.getError(), "open streams of node " + request.getNode().getNodeId());
                    return new Page<>(
                            answer.getStreamsList().stream()
                                    .map(stream -> new OpeningStream(
                                            stream.getStreamId(),
                                            stream.getEpoch(),
                                            stream.getStartOffset(),
                                            stream.getEndOffset(),
                                            Wire.optional(stream.hasUploadEndOffset(), stream.getUploadEndOffset())))
                                    .toList(),
                            answer.getNextPageToken());
                }));
        return pages.toList();
    }

    private static <T> Outcomes<T> outcomes(
            String doing,
            List<Long> streamIds,
            IntFunction<io.streammeta.v1.ErrorCode> error,
            IntFunction<T> result) {
        Map<Long, T> done = new HashMap<>();
        Map<Long, RejectedException> failed = new HashMap<>();
        for (int row = 0; row < streamIds.size(); row++) {
            ErrorCode code = Wire.code(error.apply(row));
            if (code.isSuccess()) {
                done.put(streamIds.get(row), result.apply(row));
            } else {
                failed.put(streamIds.get(row), code.rejection(doing + " stream " + streamIds.get(row)));
            }
        }
        return new Outcomes<>(done, failed);
    }
}
