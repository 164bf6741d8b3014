package io.streammeta.client.errors;

/** A newer epoch of the producer has written to the stream. */
public final class ProducerFencedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public ProducerFencedException(Rejection rejection) {
        super(
                rejection,
                "reject the producer: another instance of it has its id", false);
    }
}
