package io.streammeta.store;

/** A conditional put found an existing object under its key, and changed nothing. */
public final class ObjectExistsException extends StorageException {
    private static final long serialVersionUID = 1L;

    ObjectExistsException(String key) {
        super("object '" + key + "' exists already and is unchanged. Read it to find its creator, or use another key", false, null);
    }
}
