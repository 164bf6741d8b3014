package io.streammeta.client.errors;

/** The controller does not have this call. */
public final class UnsupportedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public UnsupportedException(Rejection rejection) {
        super(
                rejection,
                "upgrade the controllers, or use a client of their version", false);
    }
}
