package io.streammeta.client.errors;

/** A source of a compaction is no longer committed: another process has compacted it. */
public final class CompactedObjectsNotFoundException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public CompactedObjectsNotFoundException(Rejection rejection) {
        super(
                rejection,
                "discard the result and plan the compaction again", false);
    }
}
