package io.streammeta.client;

import io.streammeta.v1.StreamObjectColumns;
import java.util.List;

/**
 * A stream object that is committed together with a stream set object.
 *
 * @param objectId a prepared id
 * @param slice the part of its stream in it
 * @param facts the facts of its bytes
 */
public record NewStreamObject(long objectId, StreamSlice slice, ObjectFacts facts) {
    private static final long UNKNOWN = -1;

    static StreamObjectColumns toWire(List<NewStreamObject> objects) {
        StreamObjectColumns.Builder columns = StreamObjectColumns.newBuilder();
        // One unchecked row leaves the whole column empty.
        boolean hasEpochs = objects.stream().noneMatch(object -> object.slice().streamEpoch() == StreamSlice.UNCHECKED);
        for (NewStreamObject object : objects) {
            columns.addObjectId(object.objectId())
                    .addObjectSize(object.facts().size())
                    .addStreamId(object.slice().streamId())
                    .addStartOffset(object.slice().startOffset())
                    .addEndOffset(object.slice().endOffset())
                    .addAttributes(object.facts().attributes())
                    .addMinTimestampMs(object.facts().minTimestampMs().orElse(UNKNOWN))
                    .addMaxTimestampMs(object.facts().maxTimestampMs().orElse(UNKNOWN))
                    .addCrc32C(object.facts().crc32c().orElse(UNKNOWN));
            if (hasEpochs) {
                columns.addStreamEpoch(object.slice().streamEpoch());
            }
        }
        return columns.build();
    }
}
