package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import java.util.List;
import java.util.OptionalLong;

/**
 * The objects that contain a range of a stream.
 *
 * @param error {@link ErrorCode#STREAM_NOT_EXIST}, or {@link ErrorCode#OFFSET_NOT_MATCHED} if the range starts below
 *     the stream
 * @param objects the objects, contiguous. The first contains the start, the last may reach beyond the end
 * @param streamStartOffset the first visible offset, empty if the stream does not exist
 * @param streamEndOffset the end of the stream, empty if it does not exist
 * @param lostEndOffset where to continue if the start lies in abandoned offsets, else empty
 */
public record ObjectList(
        ErrorCode error,
        List<ObjectSlice> objects,
        OptionalLong streamStartOffset,
        OptionalLong streamEndOffset,
        OptionalLong lostEndOffset) {
    static ObjectList of(io.streammeta.v1.ObjectList list) {
        return new ObjectList(
                Wire.code(list.getError()),
                list.getObjectsList().stream().map(ObjectSlice::of).toList(),
                Wire.optional(list.hasStreamStartOffset(), list.getStreamStartOffset()),
                Wire.optional(list.hasStreamEndOffset(), list.getStreamEndOffset()),
                Wire.optional(list.hasLostEndOffset(), list.getLostEndOffset()));
    }
}
