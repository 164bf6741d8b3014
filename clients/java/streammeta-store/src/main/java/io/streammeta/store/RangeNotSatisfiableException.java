package io.streammeta.store;

/** The requested range starts at or after the end of the object. */
public final class RangeNotSatisfiableException extends StorageException {
    private static final long serialVersionUID = 1L;

    RangeNotSatisfiableException(String key, long start) {
        super("object '" + key + "' ends at or before byte " + start + ". Compare its recorded size with its size in the store", false, null);
    }
}
