package io.streammeta.client.errors;

/** Put-if-absent or compare-and-set found another version. */
public final class KeyConflictException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public KeyConflictException(Rejection rejection) {
        super(
                rejection,
                "read the stored value, decide again and put with its version", false);
    }
}
