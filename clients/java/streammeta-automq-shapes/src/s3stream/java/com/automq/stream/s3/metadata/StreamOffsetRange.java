package com.automq.stream.s3.metadata;

/** Shape of a part of a stream. */
public class StreamOffsetRange {
    private final long streamId;
    private final long startOffset;
    private final long endOffset;

    public StreamOffsetRange(long streamId, long startOffset, long endOffset) {
        this.streamId = streamId;
        this.startOffset = startOffset;
        this.endOffset = endOffset;
    }

    public long streamId() {
        return streamId;
    }

    public long startOffset() {
        return startOffset;
    }

    public long endOffset() {
        return endOffset;
    }
}
