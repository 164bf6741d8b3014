package io.streammeta.client;

/** Form of an object. */
public enum ObjectKind {
    /** Not known before the commit. */
    UNSPECIFIED,
    /** Many streams of one node (SSO). */
    STREAM_SET,
    /** One stream. */
    STREAM,
    /** One stream, a table of links into other objects. */
    COMPOSITE,
    /** Bytes that a broker keeps for itself, found by name. */
    NAMED;

    static ObjectKind of(io.streammeta.v1.ObjectKind kind) {
        return switch (kind) {
            case OBJECT_KIND_STREAM_SET -> STREAM_SET;
            case OBJECT_KIND_STREAM -> STREAM;
            case OBJECT_KIND_COMPOSITE -> COMPOSITE;
            case OBJECT_KIND_NAMED -> NAMED;
            default -> UNSPECIFIED;
        };
    }
}
