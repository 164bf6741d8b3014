package io.streammeta.kafka;

import java.util.Map;
import java.util.Optional;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentId;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadata.CustomMetadata;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentMetadataUpdate;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentState;

/** Segments of tests. */
final class Segments {
    private Segments() {}

    static TopicIdPartition newPartition() {
        return new TopicIdPartition(Uuid.randomUuid(), new TopicPartition("topic", 7));
    }

    static RemoteLogSegmentMetadata segment(
            TopicIdPartition partition, long start, long end, Map<Integer, Long> epochs) {
        return segment(partition, start, end, epochs, false);
    }

    static RemoteLogSegmentMetadata segment(
            TopicIdPartition partition, long start, long end, Map<Integer, Long> epochs, boolean isTxnIndexEmpty) {
        return new RemoteLogSegmentMetadata(
                RemoteLogSegmentId.generateNew(partition), start, end, 1234, 1, 5678, 1000, epochs, isTxnIndexEmpty);
    }

    static RemoteLogSegmentMetadataUpdate update(RemoteLogSegmentMetadata segment, RemoteLogSegmentState state) {
        Optional<CustomMetadata> custom = state == RemoteLogSegmentState.COPY_SEGMENT_FINISHED
                ? Optional.of(new CustomMetadata(new byte[] {1, 2, 3}))
                : Optional.empty();
        return new RemoteLogSegmentMetadataUpdate(segment.remoteLogSegmentId(), 9999, custom, state, 2);
    }
}
