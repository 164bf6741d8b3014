package com.automq.stream.s3.objects;

import java.util.List;

/** Shape of a commit of a stream set object. */
public class CommitStreamSetObjectRequest {
    private long objectId;
    private long orderId;
    private long objectSize;
    private List<ObjectStreamRange> streamRanges = List.of();
    private List<StreamObject> streamObjects = List.of();
    private List<Long> compactedObjectIds = List.of();
    private int attributes = -1;

    public long getObjectId() {
        return objectId;
    }

    public void setObjectId(long objectId) {
        this.objectId = objectId;
    }

    public long getOrderId() {
        return orderId;
    }

    public void setOrderId(long orderId) {
        this.orderId = orderId;
    }

    public long getObjectSize() {
        return objectSize;
    }

    public void setObjectSize(long objectSize) {
        this.objectSize = objectSize;
    }

    public List<ObjectStreamRange> getStreamRanges() {
        return streamRanges;
    }

    public void setStreamRanges(List<ObjectStreamRange> streamRanges) {
        this.streamRanges = streamRanges;
    }

    public List<StreamObject> getStreamObjects() {
        return streamObjects;
    }

    public void setStreamObjects(List<StreamObject> streamObjects) {
        this.streamObjects = streamObjects;
    }

    public List<Long> getCompactedObjectIds() {
        return compactedObjectIds;
    }

    public void setCompactedObjectIds(List<Long> compactedObjectIds) {
        this.compactedObjectIds = compactedObjectIds;
    }

    public int getAttributes() {
        return attributes;
    }

    public void setAttributes(int attributes) {
        this.attributes = attributes;
    }
}
