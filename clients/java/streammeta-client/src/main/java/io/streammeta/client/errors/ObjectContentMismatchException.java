package io.streammeta.client.errors;

/** The object id was committed before, with other content. */
public final class ObjectContentMismatchException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public ObjectContentMismatchException(Rejection rejection) {
        super(
                rejection,
                "commit under newly prepared ids. Only an identical commit may be repeated", false);
    }
}
