package com.automq.stream.s3.metadata;

/** Shape of a stream. */
public class StreamMetadata {
    private final long streamId;
    private final long epoch;
    private final long startOffset;
    private final long endOffset;
    private final StreamState state;
    private int nodeId = -1;

    public StreamMetadata(long streamId, long epoch, long startOffset, long endOffset, StreamState state) {
        this.streamId = streamId;
        this.epoch = epoch;
        this.startOffset = startOffset;
        this.endOffset = endOffset;
        this.state = state;
    }

    public long streamId() {
        return streamId;
    }

    public long epoch() {
        return epoch;
    }

    public long startOffset() {
        return startOffset;
    }

    public long endOffset() {
        return endOffset;
    }

    public StreamState state() {
        return state;
    }

    public int nodeId() {
        return nodeId;
    }

    public void nodeId(int nodeId) {
        this.nodeId = nodeId;
    }
}
