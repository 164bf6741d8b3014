package io.streammeta.client.errors;

/** The node has not registered. */
public final class NodeNotRegisteredException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public NodeNotRegisteredException(Rejection rejection) {
        super(
                rejection,
                "register the node, then retry", false);
    }
}
