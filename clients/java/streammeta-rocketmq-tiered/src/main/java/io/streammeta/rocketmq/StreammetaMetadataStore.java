package io.streammeta.rocketmq;

import java.util.function.Consumer;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.common.FileSegmentType;
import org.apache.rocketmq.tieredstore.metadata.MetadataStore;
import org.apache.rocketmq.tieredstore.metadata.entity.FileSegmentMetadata;
import org.apache.rocketmq.tieredstore.metadata.entity.QueueMetadata;
import org.apache.rocketmq.tieredstore.metadata.entity.TopicMetadata;

/**
 * Topics, queues and segments of a broker's tier as keys of the controllers. Set {@code tieredMetadataServiceProvider} to
 * this class.
 *
 * <p>Reads are local, from memory that a watch keeps current, and return copies. Writes return once a majority of the
 * controllers has them. They throw a {@link io.streammeta.client.errors.StreammetaException} if the controllers don't
 * answer, and an {@link IllegalStateException} if a newer process of the broker has taken over.
 */
public final class StreammetaMetadataStore implements MetadataStore {
    private static final String TOPICS = "topic/";
    private static final String QUEUES = "queue/";
    private static final String TOPIC_IDS = "topic-ids";

    /** Counter of topic ids. */
    static final class TopicIds {
        private long next;

        static TopicIds following(TopicIds ids) {
            TopicIds following = new TopicIds();
            following.setNext(ids == null ? 1 : ids.getNext() + 1);
            return following;
        }

        /** Returns the id of the next topic. */
        public long getNext() {
            return next;
        }

        /** Sets the id of the next topic. */
        public void setNext(long next) {
            this.next = next;
        }
    }

    private final TierKeys keys;
    private final SegmentObjects objects;

    /** Opens the tier of a broker, as the broker does, and loads its keys. */
    public StreammetaMetadataStore(MessageStoreConfig storeConfig) {
        this(Tier.of(storeConfig));
    }

    StreammetaMetadataStore(Tier tier) {
        keys = tier.keys();
        objects = tier.objects();
    }

    @Override
    public TopicMetadata getTopic(String topic) {
        return keys.get(TOPICS + topic, TopicMetadata.class).orElse(null);
    }

    /** Adds a topic with an id that no topic of this broker has had, or returns the present one. */
    @Override
    public synchronized TopicMetadata addTopic(String topic, long reserveTime) {
        TopicMetadata present = getTopic(topic);
        if (present != null) {
            return present;
        }
        // One thread at a time: two would take an equal counter for their own.
        long id = keys.update(TOPIC_IDS, TopicIds.class, TopicIds::following).getNext() - 1;
        return keys.putIfAbsent(TOPICS + topic, new TopicMetadata(id, topic, reserveTime), TopicMetadata.class);
    }

    @Override
    public void updateTopic(TopicMetadata topicMetadata) {
        topicMetadata.setUpdateTimestamp(System.currentTimeMillis());
        keys.replace(TOPICS + topicMetadata.getTopic(), topicMetadata);
    }

    @Override
    public void iterateTopic(Consumer<TopicMetadata> callback) {
        keys.forEach(TOPICS, TopicMetadata.class, callback);
    }

    @Override
    public void deleteTopic(String topic) {
        keys.delete(TOPICS + topic);
    }

    @Override
    public QueueMetadata getQueue(MessageQueue mq) {
        return keys.get(queueKey(mq), QueueMetadata.class).orElse(null);
    }

    @Override
    public QueueMetadata addQueue(MessageQueue mq, long baseOffset) {
        return keys.putIfAbsent(queueKey(mq), new QueueMetadata(mq, baseOffset, baseOffset), QueueMetadata.class);
    }

    @Override
    public void updateQueue(QueueMetadata queueMetadata) {
        queueMetadata.setUpdateTimestamp(System.currentTimeMillis());
        keys.replace(queueKey(queueMetadata.getQueue()), queueMetadata);
    }

    @Override
    public void iterateQueue(String topic, Consumer<QueueMetadata> callback) {
        keys.forEach(QUEUES + topic + "/", QueueMetadata.class, callback);
    }

    @Override
    public void deleteQueue(MessageQueue mq) {
        keys.delete(queueKey(mq));
    }

    @Override
    public FileSegmentMetadata getFileSegment(String basePath, FileSegmentType fileType, long baseOffset) {
        return keys.get(new SegmentName(basePath, fileType, baseOffset).key(), FileSegmentMetadata.class).orElse(null);
    }

    @Override
    public void updateFileSegment(FileSegmentMetadata fileSegmentMetadata) {
        keys.put(nameOf(fileSegmentMetadata).key(), fileSegmentMetadata);
    }

    @Override
    public void iterateFileSegment(Consumer<FileSegmentMetadata> callback) {
        keys.forEach(SegmentName.ALL, FileSegmentMetadata.class, callback);
    }

    @Override
    public void iterateFileSegment(String basePath, FileSegmentType fileType, Consumer<FileSegmentMetadata> callback) {
        keys.forEach(SegmentName.prefix(basePath, fileType), FileSegmentMetadata.class, callback);
    }

    /** Deletes the segments of a flat file, and their bytes. */
    @Override
    public void deleteFileSegment(String basePath, FileSegmentType fileType) {
        iterateFileSegment(basePath, fileType, segment -> objects.destroy(nameOf(segment)));
    }

    /** Deletes a segment, and its bytes. */
    @Override
    public void deleteFileSegment(String basePath, FileSegmentType fileType, long baseOffset) {
        objects.destroy(new SegmentName(basePath, fileType, baseOffset));
    }

    /** Deletes everything in the broker's tier, except its owner and the counter of topic ids. */
    @Override
    public void destroy() {
        iterateFileSegment(segment -> objects.destroy(nameOf(segment)));
        keys.under(QUEUES).forEach(keys::delete);
        keys.under(TOPICS).forEach(keys::delete);
    }

    private static SegmentName nameOf(FileSegmentMetadata segment) {
        return new SegmentName(
                segment.getPath(), FileSegmentType.valueOf(segment.getType()), segment.getBaseOffset());
    }

    private static String queueKey(MessageQueue mq) {
        return QUEUES + mq.getTopic() + "/" + mq.getQueueId();
    }
}
