package com.automq.stream.s3;

import com.automq.stream.Version;
import java.util.function.Supplier;

/** Shape of the configuration of s3stream. */
public class Config {
    private int nodeId;
    private long nodeEpoch;
    private String walConfig;

    public int nodeId() {
        return nodeId;
    }

    public Config nodeId(int nodeId) {
        this.nodeId = nodeId;
        return this;
    }

    public long nodeEpoch() {
        return nodeEpoch;
    }

    public Config nodeEpoch(long nodeEpoch) {
        this.nodeEpoch = nodeEpoch;
        return this;
    }

    public String walConfig() {
        return walConfig;
    }

    public Config walConfig(String walConfig) {
        this.walConfig = walConfig;
        return this;
    }

    public Config version(Supplier<Version> version) {
        return this;
    }
}
