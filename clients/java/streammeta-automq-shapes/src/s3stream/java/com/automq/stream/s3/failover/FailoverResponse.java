package com.automq.stream.s3.failover;

/** Shape of a recovered node. */
public class FailoverResponse {
    private int nodeId;
    private long epoch;

    public int getNodeId() {
        return nodeId;
    }

    public void setNodeId(int nodeId) {
        this.nodeId = nodeId;
    }

    public long getEpoch() {
        return epoch;
    }

    public void setEpoch(long epoch) {
        this.epoch = epoch;
    }
}
