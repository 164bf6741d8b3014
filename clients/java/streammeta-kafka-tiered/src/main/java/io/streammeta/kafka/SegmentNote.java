package io.streammeta.kafka;

import io.streammeta.client.KeyValue;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Map;
import java.util.NavigableMap;
import java.util.Optional;
import java.util.TreeMap;
import java.util.stream.Stream;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentId;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata.CustomMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadataUpdate;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState;

/**
 * What the controllers know of a remote segment: the value of its key.
 *
 * @param metadata the metadata as Kafka sees it
 * @param isCopied whether the segment has ever been in the state COPY_SEGMENT_FINISHED
 * @param version the version of the key, 0 if the note is not stored yet
 */
record SegmentNote(RemoteLogSegmentMetadata metadata, boolean isCopied, long version) {
    private static final byte FORMAT = 1;
    private static final int COPIED = 1;
    private static final int TXN_INDEX_EMPTY = 2;
    private static final int FIXED_BYTES = 64;
    private static final int EPOCH_BYTES = Integer.BYTES + Long.BYTES;
    /** Kafka 3.9 does not tell whether a transaction index is empty. */
    private static final boolean HAS_TXN_INDEX_FLAG = Stream.of(RemoteLogSegmentMetadata.class.getMethods())
            .anyMatch(method -> method.getName().equals("isTxnIdxEmpty"));

    static SegmentNote ofNew(RemoteLogSegmentMetadata metadata) {
        return new SegmentNote(metadata, false, 0);
    }

    RemoteLogSegmentId id() {
        return metadata.remoteLogSegmentId();
    }

    RemoteLogSegmentState state() {
        return metadata.state();
    }

    SegmentNote with(RemoteLogSegmentMetadataUpdate update) {
        RemoteLogSegmentMetadata updated = metadata.createWithUpdates(update);
        return new SegmentNote(
                updated, isCopied || updated.state() == RemoteLogSegmentState.COPY_SEGMENT_FINISHED, version);
    }

    /** Returns the value of the key. Numbers are big-endian. */
    byte[] toBytes() {
        byte[] topic = id().topicIdPartition().topic().getBytes(StandardCharsets.UTF_8);
        byte[] custom = metadata.customMetadata().map(CustomMetadata::value).orElse(null);
        NavigableMap<Integer, Long> epochs = metadata.segmentLeaderEpochs();
        ByteBuffer buffer = ByteBuffer.allocate(FIXED_BYTES
                + topic.length
                + epochs.size() * EPOCH_BYTES
                + (custom == null ? 0 : custom.length));

        buffer.put(FORMAT).put(state().id()).put((byte) flags());
        buffer.putInt(metadata.brokerId()).putLong(metadata.eventTimestampMs());
        buffer.putLong(metadata.startOffset()).putLong(metadata.endOffset());
        buffer.putLong(metadata.maxTimestampMs()).putInt(metadata.segmentSizeInBytes());
        buffer.putShort((short) topic.length).put(topic);
        buffer.putInt(epochs.size());
        epochs.forEach((epoch, start) -> buffer.putInt(epoch).putLong(start));
        buffer.putInt(custom == null ? -1 : custom.length);
        if (custom != null) {
            buffer.put(custom);
        }

        byte[] bytes = new byte[buffer.flip().remaining()];
        buffer.get(bytes);
        return bytes;
    }

    private int flags() {
        boolean isTxnIndexEmpty = HAS_TXN_INDEX_FLAG && metadata.isTxnIdxEmpty();
        return (isCopied ? COPIED : 0) | (isTxnIndexEmpty ? TXN_INDEX_EMPTY : 0);
    }

    /**
     * Returns the note of a key.
     *
     * @throws IllegalArgumentException if the key or its value is not of this format
     */
    static SegmentNote of(KeyValue stored) {
        ByteBuffer buffer = ByteBuffer.wrap(stored.value());
        try {
            byte format = buffer.get();
            if (format != FORMAT) {
                throw new IllegalArgumentException(
                        "key '" + stored.key() + "' has format " + format + ". Next step: upgrade this plug-in");
            }
            return parse(stored, buffer);
        } catch (BufferUnderflowException error) {
            throw new IllegalArgumentException("the value of key '" + stored.key() + "' is cut off", error);
        }
    }

    private static SegmentNote parse(KeyValue stored, ByteBuffer buffer) {
        RemoteLogSegmentState state = RemoteLogSegmentState.forId(buffer.get());
        byte flags = buffer.get();
        int brokerId = buffer.getInt();
        long eventTimestampMs = buffer.getLong();
        long startOffset = buffer.getLong();
        long endOffset = buffer.getLong();
        long maxTimestampMs = buffer.getLong();
        int size = buffer.getInt();
        String topic = new String(bytes(buffer, buffer.getShort()), StandardCharsets.UTF_8);
        Map<Integer, Long> epochs = new TreeMap<>();
        for (int rest = buffer.getInt(); rest > 0; rest--) {
            epochs.put(buffer.getInt(), buffer.getLong());
        }
        int customLength = buffer.getInt();
        Optional<CustomMetadata> custom =
                customLength < 0 ? Optional.empty() : Optional.of(new CustomMetadata(bytes(buffer, customLength)));

        RemoteLogSegmentId id = SegmentKeys.parse(stored.key(), topic);
        RemoteLogSegmentMetadata metadata = HAS_TXN_INDEX_FLAG
                ? new RemoteLogSegmentMetadata(
                        id, startOffset, endOffset, maxTimestampMs, brokerId, eventTimestampMs, size, custom, state,
                        epochs, (flags & TXN_INDEX_EMPTY) != 0)
                : new RemoteLogSegmentMetadata(
                        id, startOffset, endOffset, maxTimestampMs, brokerId, eventTimestampMs, size, custom, state,
                        epochs);
        return new SegmentNote(metadata, (flags & COPIED) != 0, stored.version());
    }

    private static byte[] bytes(ByteBuffer buffer, int length) {
        byte[] bytes = new byte[length];
        buffer.get(bytes);
        return bytes;
    }
}
