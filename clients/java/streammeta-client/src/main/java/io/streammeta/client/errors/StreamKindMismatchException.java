package io.streammeta.client.errors;

/** The stream is shared and must be owned, or the other way round. */
public final class StreamKindMismatchException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public StreamKindMismatchException(Rejection rejection) {
        super(
                rejection,
                "describe the stream, and use the calls of its kind", false);
    }
}
