package com.automq.stream.s3.objects;

import com.automq.stream.s3.compact.CompactOperations;
import java.util.List;

/** Shape of a commit of a compacted stream object. */
public class CompactStreamObjectRequest {
    private final long objectId;
    private final long objectSize;
    private final long streamId;
    private final long streamEpoch;
    private final long startOffset;
    private final long endOffset;
    private final List<Long> sourceObjectIds;
    private final List<CompactOperations> operations;
    private final int attributes;

    public CompactStreamObjectRequest(
            long objectId,
            long objectSize,
            long streamId,
            long streamEpoch,
            long startOffset,
            long endOffset,
            List<Long> sourceObjectIds,
            List<CompactOperations> operations,
            int attributes) {
        this.objectId = objectId;
        this.objectSize = objectSize;
        this.streamId = streamId;
        this.streamEpoch = streamEpoch;
        this.startOffset = startOffset;
        this.endOffset = endOffset;
        this.sourceObjectIds = sourceObjectIds;
        this.operations = operations;
        this.attributes = attributes;
    }

    public long getObjectId() {
        return objectId;
    }

    public long getObjectSize() {
        return objectSize;
    }

    public long getStreamId() {
        return streamId;
    }

    public long getStreamEpoch() {
        return streamEpoch;
    }

    public long getStartOffset() {
        return startOffset;
    }

    public long getEndOffset() {
        return endOffset;
    }

    public List<Long> getSourceObjectIds() {
        return sourceObjectIds;
    }

    public List<CompactOperations> getOperations() {
        return operations;
    }

    public int getAttributes() {
        return attributes;
    }
}
