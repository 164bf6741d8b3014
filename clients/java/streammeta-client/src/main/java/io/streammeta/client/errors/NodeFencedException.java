package io.streammeta.client.errors;

/** Another node is recovering the node's streams. */
public class NodeFencedException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public NodeFencedException(Rejection rejection) {
        super(
                rejection,
                "stop writing as this node. Restart the broker with a larger node epoch", false);
    }

    NodeFencedException(Rejection rejection, String nextStep) {
        super(rejection, nextStep, false);
    }
}
