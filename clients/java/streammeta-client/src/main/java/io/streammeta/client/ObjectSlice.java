package io.streammeta.client;

/**
 * An object and its part of a stream.
 *
 * @param objectId the id of the object
 * @param kind how to read it
 * @param offsets the stream's offsets in it
 * @param facts size, attributes, times and checksum of the whole object
 */
public record ObjectSlice(long objectId, ObjectKind kind, OffsetRange offsets, ObjectFacts facts) {
    static ObjectSlice of(io.streammeta.v1.ObjectSlice slice) {
        return new ObjectSlice(
                slice.getObjectId(),
                ObjectKind.of(slice.getKind()),
                new OffsetRange(slice.getStartOffset(), slice.getEndOffset()),
                new ObjectFacts(
                        slice.getObjectSize(),
                        slice.getAttributes(),
                        Wire.optional(slice.hasMinTimestampMs(), slice.getMinTimestampMs()),
                        Wire.optional(slice.hasMaxTimestampMs(), slice.getMaxTimestampMs()),
                        Wire.checksum(slice.hasCrc32C(), slice.getCrc32C())));
    }
}
