package io.streammeta.client.errors;

/** The request contradicts itself or breaks a rule of the contract. */
public final class InvalidRequestException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public InvalidRequestException(Rejection rejection) {
        super(
                rejection,
                "correct the named field. A retry of the same request fails again", false);
    }
}
