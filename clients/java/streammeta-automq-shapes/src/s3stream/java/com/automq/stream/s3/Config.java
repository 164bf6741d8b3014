package com.automq.stream.s3;

import com.automq.stream.Version;
import java.util.function.Supplier;

/** Shape of the configuration of s3stream. */
public class Config {
    public int nodeId() {
        throw new UnsupportedOperationException();
    }

    public long nodeEpoch() {
        throw new UnsupportedOperationException();
    }

    public String walConfig() {
        throw new UnsupportedOperationException();
    }

    public Config version(Supplier<Version> version) {
        throw new UnsupportedOperationException();
    }
}
