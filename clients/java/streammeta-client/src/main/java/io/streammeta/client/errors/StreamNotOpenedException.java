package io.streammeta.client.errors;

/** The stream is closed. */
public final class StreamNotOpenedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public StreamNotOpenedException(Rejection rejection) {
        super(
                rejection,
                "open the stream before writing to it", false);
    }
}
