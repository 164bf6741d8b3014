package io.streammeta.client.errors;

/** A range does not start at the end of its stream, or a read starts below its first visible offset. */
public final class OffsetMismatchException extends RejectedException {
    private static final long serialVersionUID = 1L;

    /** Describes a rejection by the controllers. */
    public OffsetMismatchException(Rejection rejection) {
        super(
                rejection,
                "describe or open the stream again to get its offsets, then continue from there", false);
    }
}
