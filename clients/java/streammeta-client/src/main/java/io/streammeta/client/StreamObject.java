package io.streammeta.client;

/**
 * A committed stream object or composite.
 *
 * @param objectId the id of the object
 * @param kind {@link ObjectKind#STREAM} or {@link ObjectKind#COMPOSITE}
 * @param offsets the offsets in it
 * @param committedAtMs when it was committed, in ms since 1970
 * @param facts size, attributes, times and checksum
 */
public record StreamObject(long objectId, ObjectKind kind, OffsetRange offsets, long committedAtMs, ObjectFacts facts) {
    static StreamObject of(io.streammeta.v1.StreamObject object) {
        return new StreamObject(
                object.getObjectId(),
                ObjectKind.of(object.getKind()),
                new OffsetRange(object.getStartOffset(), object.getEndOffset()),
                object.getCommittedAtMs(),
                new ObjectFacts(
                        object.getObjectSize(),
                        object.getAttributes(),
                        Wire.optional(object.hasMinTimestampMs(), object.getMinTimestampMs()),
                        Wire.optional(object.hasMaxTimestampMs(), object.getMaxTimestampMs()),
                        Wire.checksum(object.hasCrc32C(), object.getCrc32C())));
    }
}
