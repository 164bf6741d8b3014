package io.streammeta.store;

/** No object with this key exists. */
public final class ObjectNotFoundException extends StorageException {
    private static final long serialVersionUID = 1L;

    ObjectNotFoundException(String key) {
        super("object '" + key + "' does not exist. Check that the bucket or path is correct", false, null);
    }
}
