package io.streammeta.client.errors;

/** The row was committed before, but its offsets are no longer known. */
public final class OffsetsUnknownException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public OffsetsUnknownException(Rejection rejection) {
        super(
                rejection,
                "report to the producer that its records are stored at an unknown offset", false);
    }
}
