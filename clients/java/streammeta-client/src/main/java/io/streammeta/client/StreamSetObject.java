package io.streammeta.client;

/**
 * A committed stream set object of a node.
 *
 * @param objectId the id of the object
 * @param orderId the position among the node's stream set objects
 * @param dataTimeMs when its oldest data was committed, in ms since 1970
 * @param rangeCount the number of ranges in it
 * @param facts size, times and checksum
 */
public record StreamSetObject(long objectId, long orderId, long dataTimeMs, int rangeCount, ObjectFacts facts) {
    static StreamSetObject of(io.streammeta.v1.StreamSetObject object) {
        return new StreamSetObject(
                object.getObjectId(),
                object.getOrderId(),
                object.getDataTimeMs(),
                object.getRangeCount(),
                new ObjectFacts(
                        object.getObjectSize(),
                        0,
                        Wire.optional(object.hasMinTimestampMs(), object.getMinTimestampMs()),
                        Wire.optional(object.hasMaxTimestampMs(), object.getMaxTimestampMs()),
                        Wire.checksum(object.hasCrc32C(), object.getCrc32C())));
    }
}
