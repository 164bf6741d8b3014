package io.streammeta.client;

import java.util.Optional;

/** A committed change of the metadata, in the log entry at {@code offset}. */
public sealed interface MetadataChange {
    /** Returns the offset of the log entry. */
    long offset();

    /**
     * A new value of a key, or its deletion.
     *
     * @param offset the offset of the log entry
     * @param namespace the namespace, empty for the default one
     * @param key the key
     * @param value the value and its version, empty for a deleted key
     */
    record Key(long offset, String namespace, String key, Optional<KeyValue> value) implements MetadataChange {}

    /**
     * A change of a stream. A stream is also committed when its objects are compacted.
     *
     * @param offset the offset of the log entry
     * @param streamId the stream
     * @param event what happened
     */
    record Stream(long offset, long streamId, Event event) implements MetadataChange {}

    /**
     * A change of an object.
     *
     * @param offset the offset of the log entry
     * @param objectId the object
     * @param event what happened
     */
    record Object(long offset, long objectId, Event event) implements MetadataChange {}

    /**
     * A change of a node.
     *
     * @param offset the offset of the log entry
     * @param nodeId the node
     */
    record Node(long offset, int nodeId) implements MetadataChange {}

    /** What happened to a stream or an object. */
    enum Event {
        /** A stream was created. */
        CREATED,
        /** A stream was opened. */
        OPENED,
        /** A stream was closed. */
        CLOSED,
        /** The visible start of a stream moved. */
        TRIMMED,
        /** A stream was deleted. */
        DELETED,
        /** Pending uploads of a stream were abandoned. */
        ABANDONED,
        /** An object was prepared. */
        PREPARED,
        /** Data of a stream, or an object, was committed. */
        COMMITTED,
        /** An object is no longer listed, and stays only because a composite object refers to it. */
        LINKED,
        /** An object was marked as destroyed. */
        DESTROYED,
        /** An object's bytes were deleted. */
        REMOVED
    }
}
