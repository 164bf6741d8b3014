package io.streammeta.client;

import java.util.List;
import java.util.OptionalInt;
import java.util.OptionalLong;

/**
 * An object, as the metadata knows it.
 *
 * @param objectId the id, never reused
 * @param state the state
 * @param kind the form, unspecified until the commit
 * @param facts size, attributes, times and checksum, the size 0 until the commit
 * @param deadlineMs when a prepared object expires, in ms since 1970, else empty
 * @param nodeId the node of a stream set object, else empty
 * @param streamId the stream of a stream object, else empty
 * @param ranges the streams in it
 * @param compositeId the composite object that refers to a linked one, else empty
 * @param dataTimeMs when the oldest data of a stream set object was committed, else empty
 * @param committedAtMs when it was committed, empty unless it is committed or linked
 * @param markedAtMs when it was marked as destroyed, else empty
 */
public record ObjectDescription(
        long objectId,
        ObjectState state,
        ObjectKind kind,
        ObjectFacts facts,
        OptionalLong deadlineMs,
        OptionalInt nodeId,
        OptionalLong streamId,
        List<StreamSlice> ranges,
        OptionalLong compositeId,
        OptionalLong dataTimeMs,
        OptionalLong committedAtMs,
        OptionalLong markedAtMs) {
    static ObjectDescription of(io.streammeta.v1.ObjectDescription object) {
        return new ObjectDescription(
                object.getObjectId(),
                ObjectState.of(object.getState()),
                ObjectKind.of(object.getKind()),
                new ObjectFacts(
                        object.getObjectSize(),
                        object.getAttributes(),
                        Wire.optional(object.hasMinTimestampMs(), object.getMinTimestampMs()),
                        Wire.optional(object.hasMaxTimestampMs(), object.getMaxTimestampMs()),
                        Wire.checksum(object.hasCrc32C(), object.getCrc32C())),
                Wire.optional(object.hasDeadlineMs(), object.getDeadlineMs()),
                Wire.optional(object.hasNodeId(), object.getNodeId()),
                Wire.optional(object.hasStreamId(), object.getStreamId()),
                StreamSlice.of(object.getRanges()),
                Wire.optional(object.hasCompositeId(), object.getCompositeId()),
                Wire.optional(object.hasDataTimeMs(), object.getDataTimeMs()),
                Wire.optional(object.hasCommittedAtMs(), object.getCommittedAtMs()),
                Wire.optional(object.hasMarkedAtMs(), object.getMarkedAtMs()));
    }
}
