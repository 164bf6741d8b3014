package io.streammeta.client.errors;

/** The controller failed in an unexpected way. */
public final class ControllerDefectException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public ControllerDefectException(Rejection rejection) {
        super(
                rejection,
                "nothing was changed. Report it together with the controller's log", false);
    }
}
