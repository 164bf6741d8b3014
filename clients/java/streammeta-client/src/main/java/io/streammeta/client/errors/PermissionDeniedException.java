package io.streammeta.client.errors;

/** The controller does not allow this caller to do this. */
public final class PermissionDeniedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public PermissionDeniedException(Rejection rejection) {
        super(
                rejection,
                "check the credentials and the controller's access rules", false);
    }
}
