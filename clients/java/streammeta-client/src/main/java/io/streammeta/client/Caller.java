package io.streammeta.client;

/**
 * Who calls: a registered process, in its own name or in that of a node that it recovers.
 *
 * @param self the registered process
 * @param recovered the node in whose name it calls, null for its own
 */
record Caller(NodeIdentity self, NodeIdentity recovered) {
    /** Returns the node whose data a call changes. */
    io.streammeta.v1.NodeIdentity owner() {
        return (recovered == null ? self : recovered).toWire();
    }

    boolean isRecovering() {
        return recovered != null;
    }
}
