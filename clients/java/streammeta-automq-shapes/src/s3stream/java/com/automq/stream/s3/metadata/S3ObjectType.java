package com.automq.stream.s3.metadata;

/** Shape of an object's form. */
public enum S3ObjectType {
    STREAM_SET,
    STREAM,
    UNKNOWN,
    COMPOSITE
}
