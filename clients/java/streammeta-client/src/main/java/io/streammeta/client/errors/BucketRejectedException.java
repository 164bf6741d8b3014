package io.streammeta.client.errors;

/** The bucket belongs to another cluster, so the controllers issue no object ids. */
public final class BucketRejectedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public BucketRejectedException(Rejection rejection) {
        super(
                rejection,
                "start the controllers with their own bucket and namespace", false);
    }
}
