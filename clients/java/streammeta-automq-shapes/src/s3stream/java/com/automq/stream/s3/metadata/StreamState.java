package com.automq.stream.s3.metadata;

/** Shape of a stream's state. */
public enum StreamState {
    CLOSED,
    OPENED
}
