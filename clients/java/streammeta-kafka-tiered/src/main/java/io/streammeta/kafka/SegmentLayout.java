package io.streammeta.kafka;

import java.nio.ByteBuffer;
import java.util.EnumMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata.CustomMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteStorageManager.IndexType;

/**
 * Where the bytes of a segment are: the custom metadata of a segment. It has 33 bytes.
 *
 * @param dataObjectId the object with the records. The next id is that of the object with all indexes
 * @param dataSize the bytes of the records
 * @param indexSizes the bytes of each index, in the order of {@link #INDEXES} in the object, without absent ones
 */
record SegmentLayout(long dataObjectId, int dataSize, Map<IndexType, Integer> indexSizes) {
    /** The order in the object and in the custom metadata. */
    static final List<IndexType> INDEXES = List.of(
            IndexType.OFFSET,
            IndexType.TIMESTAMP,
            IndexType.PRODUCER_SNAPSHOT,
            IndexType.TRANSACTION,
            IndexType.LEADER_EPOCH);

    private static final byte FORMAT = 1;
    private static final int ABSENT = -1;
    private static final int BYTES = Byte.BYTES + Long.BYTES + Integer.BYTES + INDEXES.size() * Integer.BYTES;

    /** The bytes of one index in the object with all of them, without the one at {@code end}. */
    record Range(long start, long end) {}

    long indexObjectId() {
        return dataObjectId + 1;
    }

    /** Returns the place of an index, empty if the segment has none of this type. */
    Optional<Range> index(IndexType type) {
        long start = 0;
        for (IndexType index : INDEXES) {
            Integer size = indexSizes.get(index);
            if (index == type) {
                return size == null ? Optional.empty() : Optional.of(new Range(start, start + size));
            }
            start += size == null ? 0 : size;
        }
        return Optional.empty();
    }

    CustomMetadata toCustomMetadata() {
        ByteBuffer buffer = ByteBuffer.allocate(BYTES).put(FORMAT).putLong(dataObjectId).putInt(dataSize);
        INDEXES.forEach(type -> buffer.putInt(indexSizes.getOrDefault(type, ABSENT)));
        return new CustomMetadata(buffer.array());
    }

    /**
     * Returns the layout of custom metadata.
     *
     * @throws IllegalArgumentException if another plug-in has written it
     */
    static SegmentLayout of(CustomMetadata custom) {
        ByteBuffer buffer = ByteBuffer.wrap(custom.value());
        if (buffer.remaining() != BYTES || buffer.get() != FORMAT) {
            throw new IllegalArgumentException("the custom metadata " + custom + " is not of this plug-in");
        }
        long dataObjectId = buffer.getLong();
        int dataSize = buffer.getInt();
        Map<IndexType, Integer> sizes = new EnumMap<>(IndexType.class);
        for (IndexType type : INDEXES) {
            int size = buffer.getInt();
            if (size != ABSENT) {
                sizes.put(type, size);
            }
        }
        return new SegmentLayout(dataObjectId, dataSize, sizes);
    }
}
