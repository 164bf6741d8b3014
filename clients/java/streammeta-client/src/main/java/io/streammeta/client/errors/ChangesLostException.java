package io.streammeta.client.errors;

import java.util.Map;

/** No controller keeps the next change of a watch any longer. */
public final class ChangesLostException extends StreammetaException {
    private static final long serialVersionUID = 1L;

    private final long position;

    /** Describes a watch whose next change, at offset {@code position}, is compacted away. */
    public ChangesLostException(long position) {
        super(
                "the changes from offset " + position + " on are compacted away on every controller",
                "",
                Map.of(),
                "start a new watch from now, then read the state again",
                false);
        this.position = position;
    }

    /** Returns the offset of the first lost change. */
    public long position() {
        return position;
    }
}
