package io.streammeta.store;

/**
 * The store rejected the credentials, or they do not allow this call. It may pass: keys are rotated, a policy is
 * fixed.
 */
public final class AccessDeniedException extends StorageException {
    private static final long serialVersionUID = 1L;

    AccessDeniedException(String message, Throwable cause) {
        super(message, true, cause);
    }
}
