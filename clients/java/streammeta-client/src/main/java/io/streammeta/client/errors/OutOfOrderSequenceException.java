package io.streammeta.client.errors;

/** The batch does not continue its producer's sequence. */
public final class OutOfOrderSequenceException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public OutOfOrderSequenceException(Rejection rejection) {
        super(
                rejection,
                "report it to the producer, which sends the missing batch first", false);
    }
}
