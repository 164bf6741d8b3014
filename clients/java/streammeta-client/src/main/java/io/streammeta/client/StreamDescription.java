package io.streammeta.client;

import java.util.List;
import java.util.Map;
import java.util.OptionalInt;
import java.util.OptionalLong;

/**
 * A stream.
 *
 * @param streamId the id, never reused
 * @param epoch the epoch of the stream, empty if it was never opened
 * @param startOffset the first visible offset
 * @param endOffset the offset at which the next commit must start
 * @param isOpen whether its owner may commit
 * @param nodeId the owner of the current range, empty if it was never opened
 * @param tags the labels, by key
 * @param ranges the intervals of ownership, in order. Empty unless they were asked for
 * @param streamObjects the stream objects, by start offset. Empty unless they were asked for
 * @param pendingUploads the pending uploads of former owners, by start offset
 * @param lost the abandoned offsets, by start offset
 */
public record StreamDescription(
        long streamId,
        OptionalLong epoch,
        long startOffset,
        long endOffset,
        boolean isOpen,
        OptionalInt nodeId,
        Map<String, String> tags,
        List<Range> ranges,
        List<StreamObject> streamObjects,
        List<PendingUpload> pendingUploads,
        List<OffsetRange> lost) {

    /**
     * One interval of ownership.
     *
     * @param index the position among the stream's intervals, from 0 on
     * @param epoch the epoch of the stream when it began
     * @param offsets its offsets. The last interval of an open stream ends at the stream's end
     * @param nodeId the owner
     */
    public record Range(int index, long epoch, OffsetRange offsets, int nodeId) {}

    /**
     * A stream object.
     *
     * @param objectId the id of the object
     * @param offsets the offsets in it
     */
    public record StreamObject(long objectId, OffsetRange offsets) {}

    /**
     * Offsets that a former owner acknowledged before a fast close and has not committed yet.
     *
     * @param nodeId the node that has to upload them
     * @param offsets the offsets
     */
    public record PendingUpload(int nodeId, OffsetRange offsets) {}

    static StreamDescription of(io.streammeta.v1.StreamDescription stream) {
        return new StreamDescription(
                stream.getStreamId(),
                Wire.optional(stream.hasEpoch(), stream.getEpoch()),
                stream.getStartOffset(),
                stream.getEndOffset(),
                stream.getState() == io.streammeta.v1.StreamState.STREAM_STATE_OPENED,
                Wire.optional(stream.hasNodeId(), stream.getNodeId()),
                Wire.tags(stream.getTagsList()),
                stream.getRangesList().stream()
                        .map(range -> new Range(
                                range.getRangeIndex(),
                                range.getEpoch(),
                                new OffsetRange(range.getStartOffset(), range.getEndOffset()),
                                range.getNodeId()))
                        .toList(),
                stream.getStreamObjectsList().stream()
                        .map(object -> new StreamObject(
                                object.getObjectId(), new OffsetRange(object.getStartOffset(), object.getEndOffset())))
                        .toList(),
                stream.getPendingUploadsList().stream()
                        .map(upload -> new PendingUpload(
                                upload.getNodeId(), new OffsetRange(upload.getStartOffset(), upload.getEndOffset())))
                        .toList(),
                stream.getLostList().stream()
                        .map(range -> new OffsetRange(range.getStartOffset(), range.getEndOffset()))
                        .toList());
    }
}
