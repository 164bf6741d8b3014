package io.streammeta.kafka;

import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.server.log.remote.storage.RemoteLogSegmentId;

/**
 * Keys of segments, {@code TOPIC_ID/PARTITION/SEGMENT_ID}, within the plug-in's namespace. A key owns the named objects
 * of its segment, so that nothing of them outlives it.
 */
final class SegmentKeys {
    private SegmentKeys() {}

    static String of(RemoteLogSegmentId id) {
        return prefixOf(id.topicIdPartition()) + id.id();
    }

    /** Returns the beginning of all keys of a partition. */
    static String prefixOf(TopicIdPartition partition) {
        return partition.topicId() + "/" + partition.partition() + "/";
    }

    /** Returns the id of a key's segment, in the topic that its value names. */
    static RemoteLogSegmentId parse(String key, String topic) {
        String[] parts = key.split("/");
        if (parts.length != 3) {
            throw new IllegalArgumentException("key '" + key + "' is not TOPIC_ID/PARTITION/SEGMENT_ID");
        }
        var partition = new TopicIdPartition(Uuid.fromString(parts[0]), Integer.parseInt(parts[1]), topic);
        return new RemoteLogSegmentId(partition, Uuid.fromString(parts[2]));
    }
}
