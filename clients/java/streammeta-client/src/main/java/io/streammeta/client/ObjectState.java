package io.streammeta.client;

/** State of an object. An id is issued once and never reused. */
public enum ObjectState {
    /** A state of a later version. */
    UNSPECIFIED,
    /** Issued to a writer. It expires unless it is committed. */
    PREPARED,
    /** Part of the metadata. */
    COMMITTED,
    /** No longer part of the metadata. Its bytes are to be deleted. */
    MARK_DESTROYED,
    /** Issued once, bytes deleted, forgotten by the metadata. */
    REMOVED,
    /** Kept only because a composite object refers to it. */
    LINKED,
    /** The counter of ids has not reached this id. */
    NOT_ISSUED;

    static ObjectState of(io.streammeta.v1.ObjectState state) {
        return switch (state) {
            case OBJECT_STATE_PREPARED -> PREPARED;
            case OBJECT_STATE_COMMITTED -> COMMITTED;
            case OBJECT_STATE_MARK_DESTROYED -> MARK_DESTROYED;
            case OBJECT_STATE_REMOVED -> REMOVED;
            case OBJECT_STATE_LINKED -> LINKED;
            case OBJECT_STATE_NOT_ISSUED -> NOT_ISSUED;
            default -> UNSPECIFIED;
        };
    }
}
