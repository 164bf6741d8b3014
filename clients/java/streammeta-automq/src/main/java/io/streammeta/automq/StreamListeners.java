package io.streammeta.automq;

import com.automq.stream.s3.metadata.StreamMetadata;
import com.automq.stream.s3.streams.StreamMetadataListener;
import io.streammeta.client.Streams;
import java.time.Duration;
import java.util.Set;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Listeners to streams. Each hears of its stream when it is added and after changes, several of which may be reported as
 * one: the last report is of the newest state.
 */
final class StreamListeners {
    private static final Logger LOG = LoggerFactory.getLogger(StreamListeners.class);
    private static final Duration DELAY_AFTER_ERROR = Duration.ofSeconds(1);

    private final Streams streams;
    private final Set<Subscription> subscriptions = ConcurrentHashMap.newKeySet();

    StreamListeners(Streams streams) {
        this.streams = streams;
    }

    StreamMetadataListener.Handle add(long streamId, StreamMetadataListener listener) {
        Subscription subscription = new Subscription(streamId, listener);
        subscriptions.add(subscription);
        subscription.refresh();
        return subscription;
    }

    void onChange(long streamId) {
        for (Subscription subscription : subscriptions) {
            if (subscription.streamId == streamId) {
                subscription.refresh();
            }
        }
    }

    /** Reports all streams, because changes may be missing. */
    void refreshAll() {
        subscriptions.forEach(Subscription::refresh);
    }

    private final class Subscription implements StreamMetadataListener.Handle {
        private final long streamId;
        private final StreamMetadataListener listener;
        /** Changes since the last report. Above zero a description is requested. */
        private final AtomicInteger changes = new AtomicInteger();

        Subscription(long streamId, StreamMetadataListener listener) {
            this.streamId = streamId;
            this.listener = listener;
        }

        void refresh() {
            if (changes.getAndIncrement() == 0) {
                describe();
            }
        }

        private void describe() {
            int described = changes.get();
            streams.describe(streamId).thenAccept(found -> found.ifPresent(stream -> {
                StreamMetadata metadata = StreammetaStreamManager.metadata(stream);
                if (subscriptions.contains(this)) {
                    listener.onNewStreamMetadata(metadata);
                }
            })).whenComplete((none, error) -> {
                if (error != null && subscriptions.contains(this)) {
                    LOG.warn("stream {} is not reported, trying again in 1 s: {}", streamId, error.toString());
                    Calls.after(DELAY_AFTER_ERROR).execute(this::describe);
                } else if (!changes.compareAndSet(described, 0)) {
                    describe();
                }
            });
        }

        @Override
        public void close() {
            subscriptions.remove(this);
        }
    }
}
