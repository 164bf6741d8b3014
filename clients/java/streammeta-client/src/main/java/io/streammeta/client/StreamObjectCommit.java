package io.streammeta.client;

import io.streammeta.v1.CommitStreamObjectRequest;
import io.streammeta.v1.SourceOperation;
import java.util.List;
import java.util.Optional;

/**
 * Result of compacting stream objects of one stream: a merge, a composite, or a removal without a result.
 *
 * @param streamId the stream
 * @param streamEpoch its epoch, always checked
 * @param result the new object, empty to remove the sources only
 * @param sources the stream objects that it replaces, all of this stream
 */
public record StreamObjectCommit(long streamId, long streamEpoch, Optional<Result> result, List<Source> sources) {
    /**
     * A new stream object or composite object.
     *
     * @param objectId a prepared id
     * @param offsets its offsets
     * @param facts the facts of its bytes
     */
    public record Result(long objectId, OffsetRange offsets, ObjectFacts facts) {}

    /**
     * A stream object that is replaced.
     *
     * @param objectId the id of the object
     * @param operation what happens to it
     */
    public record Source(long objectId, Operation operation) {}

    /** What happens to a source. */
    public enum Operation {
        /** Destroys this object only. */
        DELETE,
        /** Keeps its bytes, because the result links them. */
        KEEP_DATA,
        /** Destroys it and, if it is a composite, all objects that it links. */
        DEEP_DELETE
    }

    CommitStreamObjectRequest toWire(Caller caller) {
        CommitStreamObjectRequest.Builder request = CommitStreamObjectRequest.newBuilder()
                .setNode(caller.owner())
                .setStreamId(streamId)
                .setStreamEpoch(streamEpoch);
        for (Source source : sources) {
            request.addSourceObjectIds(source.objectId());
            request.addOperations(
                    switch (source.operation()) {
                        case DELETE -> SourceOperation.SOURCE_OPERATION_DELETE;
                        case KEEP_DATA -> SourceOperation.SOURCE_OPERATION_KEEP_DATA;
                        case DEEP_DELETE -> SourceOperation.SOURCE_OPERATION_DEEP_DELETE;
                    });
        }
        result.ifPresent(made -> {
            request.setObjectId(made.objectId())
                    .setObjectSize(made.facts().size())
                    .setAttributes(made.facts().attributes())
                    .setStartOffset(made.offsets().start())
                    .setEndOffset(made.offsets().end());
            made.facts().minTimestampMs().ifPresent(request::setMinTimestampMs);
            made.facts().maxTimestampMs().ifPresent(request::setMaxTimestampMs);
            made.facts().crc32c().ifPresent(crc -> request.setCrc32C((int) crc));
        });
        return request.build();
    }
}
