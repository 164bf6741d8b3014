package io.streammeta.client.errors;

/** The stream was never created, or was deleted. */
public final class StreamNotFoundException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public StreamNotFoundException(Rejection rejection) {
        super(
                rejection,
                "check the id, or create the stream", false);
    }
}
