package io.streammeta.client.errors;

/** The key does not exist. */
public final class KeyNotFoundException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public KeyNotFoundException(Rejection rejection) {
        super(
                rejection,
                "check namespace and key", false);
    }
}
