package io.streammeta.store;

/** The store cannot contain this key. Nothing was read or written. */
public final class InvalidKeyException extends StorageException {
    private static final long serialVersionUID = 1L;

    InvalidKeyException(String key, String problem) {
        super("key '" + key + "' is invalid: " + problem + ". Use another key", false, null);
    }
}
