package io.streammeta.client;

import java.util.List;

/**
 * A committed stream set object of a node.
 *
 * @param objectId the id of the object
 * @param orderId the position among the node's stream set objects
 * @param dataTimeMs when its oldest data was committed, in ms since 1970
 * @param rangeCount the number of ranges in it
 * @param committedAtMs when it was committed, in ms since 1970. 0 from a controller of an older version
 * @param ranges the streams in it, empty unless they were asked for
 * @param facts size, attributes, times and checksum
 */
public record StreamSetObject(
        long objectId,
        long orderId,
        long dataTimeMs,
        int rangeCount,
        long committedAtMs,
        List<StreamSlice> ranges,
        ObjectFacts facts) {
    static StreamSetObject of(io.streammeta.v1.StreamSetObject object) {
        return new StreamSetObject(
                object.getObjectId(),
                object.getOrderId(),
                object.getDataTimeMs(),
                object.getRangeCount(),
                object.getCommittedAtMs(),
                StreamSlice.of(object.getRanges()),
                new ObjectFacts(
                        object.getObjectSize(),
                        object.getAttributes(),
                        Wire.optional(object.hasMinTimestampMs(), object.getMinTimestampMs()),
                        Wire.optional(object.hasMaxTimestampMs(), object.getMaxTimestampMs()),
                        Wire.checksum(object.hasCrc32C(), object.getCrc32C())));
    }
}
