package io.streammeta.client.errors;

/** A commit came after the object's deadline, or for an id that was never prepared. */
public final class ObjectExpiredException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public ObjectExpiredException(Rejection rejection) {
        super(
                rejection,
                "reconciliation removes the uploaded bytes. Prepare new ids and upload again", false);
    }
}
