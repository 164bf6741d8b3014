package io.streammeta.store;

/** Keys of the cluster's objects. */
public final class ObjectKeys {
    private ObjectKeys() {}

    /**
     * Returns the key of an object, from the id and the namespace that {@code describeCluster} returns. The first part is
     * the id in hex from its last digit on, which spreads the keys over the bucket.
     */
    public static String of(String namespace, long objectId) {
        String hex = String.format("%08x", objectId);
        return new StringBuilder(hex).reverse() + "/" + namespace + "/" + objectId;
    }
}
