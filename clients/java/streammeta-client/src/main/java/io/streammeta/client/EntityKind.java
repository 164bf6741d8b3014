package io.streammeta.client;

/** Kinds of changes that a watch selects. */
public enum EntityKind {
    /** Streams and their ranges. */
    STREAM(io.streammeta.v1.EntityKind.ENTITY_KIND_STREAM),
    /** Objects. */
    OBJECT(io.streammeta.v1.EntityKind.ENTITY_KIND_OBJECT),
    /** Nodes. */
    NODE(io.streammeta.v1.EntityKind.ENTITY_KIND_NODE),
    /** Keys and their values. */
    KEY(io.streammeta.v1.EntityKind.ENTITY_KIND_KV);

    private final io.streammeta.v1.EntityKind wire;

    EntityKind(io.streammeta.v1.EntityKind wire) {
        this.wire = wire;
    }

    io.streammeta.v1.EntityKind toWire() {
        return wire;
    }
}
