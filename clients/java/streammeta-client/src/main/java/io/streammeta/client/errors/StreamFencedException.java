package io.streammeta.client.errors;

/** Another node, or a newer epoch of the stream, owns the stream. */
public final class StreamFencedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public StreamFencedException(Rejection rejection) {
        super(
                rejection,
                "stop writing to it. To take it back, open it with a larger stream epoch", false);
    }
}
