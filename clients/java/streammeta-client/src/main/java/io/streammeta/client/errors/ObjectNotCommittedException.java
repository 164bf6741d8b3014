package io.streammeta.client.errors;

/** The object exists but is not committed. */
public final class ObjectNotCommittedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public ObjectNotCommittedException(Rejection rejection) {
        super(
                rejection,
                "commit it first, or choose another source", false);
    }
}
