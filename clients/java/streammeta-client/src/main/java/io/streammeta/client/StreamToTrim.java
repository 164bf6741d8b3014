package io.streammeta.client;

/**
 * A stream to trim.
 *
 * @param streamId the stream
 * @param epoch the epoch it was opened with
 * @param newStartOffset the first visible offset from now on
 * @param appendedEndOffset the end of the records that the owner has appended, committed or not, 0 if unknown. The trim
 *     ends there, or at the committed end if that is larger
 */
public record StreamToTrim(long streamId, long epoch, long newStartOffset, long appendedEndOffset) {
    io.streammeta.v1.StreamToTrim toWire() {
        return io.streammeta.v1.StreamToTrim.newBuilder()
                .setStreamId(streamId)
                .setStreamEpoch(epoch)
                .setNewStartOffset(newStartOffset)
                .setAppendedEndOffset(appendedEndOffset)
                .build();
    }
}
