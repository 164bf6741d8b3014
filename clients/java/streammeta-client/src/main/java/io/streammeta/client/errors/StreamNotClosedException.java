package io.streammeta.client.errors;

/** The stream is open, or its former owner has pending uploads. */
public final class StreamNotClosedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public StreamNotClosedException(Rejection rejection) {
        super(
                rejection,
                "wait until its owner has closed it, then retry", true);
    }
}
