package io.streammeta.client.errors;

/** The answer breaks the contract: an undefined code, or rows that do not match. */
public final class ProtocolViolationException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public ProtocolViolationException(Rejection rejection) {
        super(
                rejection,
                "check that client and controllers have matching versions", false);
    }
}
