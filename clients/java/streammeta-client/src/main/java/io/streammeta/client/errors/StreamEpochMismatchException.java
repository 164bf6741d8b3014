package io.streammeta.client.errors;

/** The request's epoch contradicts the stream and its current range. */
public final class StreamEpochMismatchException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public StreamEpochMismatchException(Rejection rejection) {
        super(
                rejection,
                "describe the stream, then open it with a larger stream epoch", false);
    }
}
