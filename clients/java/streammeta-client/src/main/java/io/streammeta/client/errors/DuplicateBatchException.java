package io.streammeta.client.errors;

/** The producer's batch was committed before. */
public final class DuplicateBatchException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public DuplicateBatchException(Rejection rejection) {
        super(
                rejection,
                "acknowledge it to the producer with the offset of the result", false);
    }
}
