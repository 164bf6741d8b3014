package io.streammeta.client;

import io.streammeta.v1.RangeColumns;
import java.util.ArrayList;
import java.util.List;

/**
 * Part of a stream in an object.
 *
 * @param streamId the stream
 * @param streamEpoch the epoch that the writer opened the stream with, {@link #UNCHECKED} to skip its check
 * @param startOffset the first offset
 * @param endOffset the offset after the last one
 */
public record StreamSlice(long streamId, long streamEpoch, long startOffset, long endOffset) {
    /** Stands for an epoch that is not compared with the stream's. */
    public static final long UNCHECKED = -1;

    static RangeColumns toWire(List<StreamSlice> slices) {
        RangeColumns.Builder columns = RangeColumns.newBuilder();
        // One unchecked row leaves the whole column empty.
        boolean hasEpochs = slices.stream().noneMatch(slice -> slice.streamEpoch() == UNCHECKED);
        for (StreamSlice slice : slices) {
            columns.addStreamId(slice.streamId())
                    .addStartOffset(slice.startOffset())
                    .addEndOffset(slice.endOffset());
            if (hasEpochs) {
                columns.addStreamEpoch(slice.streamEpoch());
            }
        }
        return columns.build();
    }

    static List<StreamSlice> of(RangeColumns columns) {
        List<StreamSlice> slices = new ArrayList<>();
        for (int row = 0; row < columns.getStreamIdCount(); row++) {
            slices.add(new StreamSlice(
                    columns.getStreamId(row),
                    columns.getStreamEpochCount() == 0 ? UNCHECKED : columns.getStreamEpoch(row),
                    columns.getStartOffset(row),
                    columns.getEndOffset(row)));
        }
        return slices;
    }
}
