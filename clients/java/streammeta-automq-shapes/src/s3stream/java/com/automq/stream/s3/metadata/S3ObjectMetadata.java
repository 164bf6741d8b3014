package com.automq.stream.s3.metadata;

import java.util.List;

/** Shape of an object. */
public class S3ObjectMetadata {
    private final long objectId;
    private final S3ObjectType type;
    private final List<StreamOffsetRange> offsetRanges;
    private final long dataTimeInMs;
    private final long committedTimestamp;
    private final long objectSize;
    private final long orderId;
    private final int attributes;

    public S3ObjectMetadata(
            long objectId,
            S3ObjectType type,
            List<StreamOffsetRange> offsetRanges,
            long dataTimeInMs,
            long committedTimestamp,
            long objectSize,
            long orderId,
            int attributes) {
        this.objectId = objectId;
        this.type = type;
        this.offsetRanges = offsetRanges;
        this.dataTimeInMs = dataTimeInMs;
        this.committedTimestamp = committedTimestamp;
        this.objectSize = objectSize;
        this.orderId = orderId;
        this.attributes = attributes;
    }

    public long objectId() {
        return objectId;
    }

    public S3ObjectType getType() {
        return type;
    }

    public List<StreamOffsetRange> getOffsetRanges() {
        return offsetRanges;
    }

    public long startOffset() {
        return offsetRanges.get(0).startOffset();
    }

    public long endOffset() {
        return offsetRanges.get(offsetRanges.size() - 1).endOffset();
    }

    public long dataTimeInMs() {
        return dataTimeInMs;
    }

    public long committedTimestamp() {
        return committedTimestamp;
    }

    public long objectSize() {
        return objectSize;
    }

    public long getOrderId() {
        return orderId;
    }

    public int attributes() {
        return attributes;
    }
}
