package io.streammeta.client.errors;

/** The controllers were restored to an earlier state and issue no object ids. */
public final class MetadataOlderThanBucketException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public MetadataOlderThanBucketException(Rejection rejection) {
        super(
                rejection,
                "start the controllers with their newest data directories. See docs/operations/bucket.md", false);
    }
}
