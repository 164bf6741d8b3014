package io.streammeta.client.errors;

/** A newer process of this node, or another one with the same epoch, has registered. */
public final class NodeEpochExpiredException extends NodeFencedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public NodeEpochExpiredException(Rejection rejection) {
        super(
                rejection,
                "stop this process: a newer one replaces it, or another one has its epoch. Start "
                    + "with a larger node epoch");
    }
}
