package io.streammeta.store;

/** The bucket, or the directory of a local store, does not exist. */
public final class BucketNotFoundException extends StorageException {
    private static final long serialVersionUID = 1L;

    BucketNotFoundException(String bucket) {
        super("bucket '" + bucket + "' does not exist. Create it, or correct the address of the store", false, null);
    }
}
