package com.automq.stream.s3.compact;

/** Shape of what happens to a source of a compaction. */
public enum CompactOperations {
    DELETE,
    KEEP_DATA,
    DEEP_DELETE
}
