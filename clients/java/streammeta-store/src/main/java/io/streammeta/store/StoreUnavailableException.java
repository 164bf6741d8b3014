package io.streammeta.store;

/** The store did not answer or cannot serve the call now. The call may have taken effect, and may be retried. */
public final class StoreUnavailableException extends StorageException {
    private static final long serialVersionUID = 1L;

    StoreUnavailableException(String message, Throwable cause) {
        super(message, true, cause);
    }
}
