package io.streammeta.client.errors;

/** The controllers rejected one item, or a whole call. */
public class RejectedException extends StreammetaException {
    private static final long serialVersionUID = 1L;

    private final Rejection rejection;

    /** Describes a rejection that has no class of its own. */
    public RejectedException(Rejection rejection) {
        this(rejection, "see the controller's log for the reason", false);
    }

    RejectedException(Rejection rejection, String nextStep, boolean retriable) {
        super(rejection.sentence(nextStep), rejection.reason(), rejection.metadata(), nextStep, retriable);
        this.rejection = rejection;
    }

    /** Returns the rejected item or call, such as {@code "stream 7"}. */
    public String subject() {
        return rejection.subject();
    }

    /** Returns the error code of a rejected item, {@link ErrorCode#UNKNOWN} for a whole call. */
    public ErrorCode code() {
        return rejection.code() == null ? ErrorCode.UNKNOWN : rejection.code();
    }
}
