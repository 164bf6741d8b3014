package io.streammeta.client.errors;

/** The previous owner of the stream is locked. Only it may open the stream. */
public final class NodeLockedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public NodeLockedException(Rejection rejection) {
        super(
                rejection,
                "wait until the lock is removed, then retry", true);
    }
}
