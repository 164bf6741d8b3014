package io.streammeta.store;

/** The store understood the request and will never accept it. */
public final class StoreRejectedException extends StorageException {
    private static final long serialVersionUID = 1L;

    StoreRejectedException(String message, Throwable cause) {
        super(message, false, cause);
    }
}
