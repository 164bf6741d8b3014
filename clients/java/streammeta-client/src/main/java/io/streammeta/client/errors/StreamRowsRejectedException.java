package io.streammeta.client.errors;

/** Another shared row of the stream was rejected, and this one with it. */
public final class StreamRowsRejectedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public StreamRowsRejectedException(Rejection rejection) {
        super(
                rejection,
                "upload its records again without the rejected batch, and commit them", false);
    }
}
