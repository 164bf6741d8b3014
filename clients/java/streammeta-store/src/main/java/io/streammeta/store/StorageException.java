package io.streammeta.store;

/** Base class of the errors of a store. A message names the object or bucket, the problem and the next step. */
public abstract class StorageException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    private final boolean mayPass;

    StorageException(String message, boolean mayPass, Throwable cause) {
        super(message, cause);
        this.mayPass = mayPass;
    }

    /** Returns whether the same call may succeed later without a change by its caller. */
    public final boolean mayPass() {
        return mayPass;
    }
}
