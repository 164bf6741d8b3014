package io.streammeta.client.errors;

/** The request is larger than a limit of the controller. Nothing was changed. */
public final class LimitExceededException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public LimitExceededException(Rejection rejection) {
        super(
                rejection,
                "send less in one request", false);
    }
}
