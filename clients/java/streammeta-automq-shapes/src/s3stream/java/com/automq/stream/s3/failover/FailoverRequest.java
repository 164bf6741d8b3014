package com.automq.stream.s3.failover;

/** Shape of an order to recover a node. */
public class FailoverRequest {
    private int nodeId;
    private long nodeEpoch;
    private String kraftWalConfigs;

    public int getNodeId() {
        return nodeId;
    }

    public void setNodeId(int nodeId) {
        this.nodeId = nodeId;
    }

    public long getNodeEpoch() {
        return nodeEpoch;
    }

    public void setNodeEpoch(long nodeEpoch) {
        this.nodeEpoch = nodeEpoch;
    }

    public String getKraftWalConfigs() {
        return kraftWalConfigs;
    }

    public void setKraftWalConfigs(String kraftWalConfigs) {
        this.kraftWalConfigs = kraftWalConfigs;
    }
}
