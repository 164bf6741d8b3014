package io.streammeta.automq;

import com.automq.stream.s3.metadata.StreamMetadata;
import com.automq.stream.s3.objects.CommitStreamSetObjectRequest;
import com.automq.stream.s3.objects.ObjectManager;
import com.automq.stream.s3.objects.ObjectStreamRange;
import com.automq.stream.s3.objects.StreamObject;
import com.automq.stream.s3.streams.StreamManager;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.SessionOptions;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.TimeoutException;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.jupiter.api.Assertions;

/** One node of a test, with what tests do by its managers. */
record Node(AutomqMetadata metadata, StreamManager streams, ObjectManager objects) implements AutoCloseable {
    private static final long TIME_TO_COMMIT_MS = 60_000;
    private static final AtomicLong EPOCHS = new AtomicLong();

    static Node open(List<String> endpoints, int nodeId) {
        return open(endpoints, newProcess(nodeId), SessionOptions.DEFAULT);
    }

    static Node open(List<String> endpoints, NodeIdentity identity, SessionOptions options) {
        ElasticStreamEndpoint endpoint = ElasticStreamEndpoint.parse("streammeta://" + String.join(",", endpoints));
        AutomqMetadata metadata = AutomqMetadata.open(endpoint, identity, options, HostErrors.NONE);
        return new Node(metadata, metadata.streams(), metadata.objects());
    }

    /** Returns a process that is newer than all before. */
    static NodeIdentity newProcess(int nodeId) {
        return new NodeIdentity(
                nodeId, EPOCHS.updateAndGet(last -> Math.max(last + 1, System.currentTimeMillis())));
    }

    long openedStream() {
        long streamId = get(streams.createStream(Map.of()));
        get(streams.openStream(streamId, 1, Map.of()));
        return streamId;
    }

    StreamMetadata describe(long streamId) {
        return get(streams.getStreams(List.of(streamId))).get(0);
    }

    long prepare() {
        return get(objects.prepareObject(1, TIME_TO_COMMIT_MS));
    }

    /** Commits a stream set object with a part of one stream, and returns its id. */
    long commit(long streamId, long start, long end) {
        long objectId = prepare();
        get(objects.commitStreamSetObject(upload(objectId, streamId, start, end)));
        return objectId;
    }

    /** Commits a stream object without a stream set object, and returns its id. */
    long commitStreamObject(long streamId, long start, long end) {
        long objectId = prepare();
        StreamObject object = new StreamObject();
        object.setObjectId(objectId);
        object.setObjectSize(100);
        object.setStreamId(streamId);
        object.setStartOffset(start);
        object.setEndOffset(end);
        object.setAttributes(0);
        CommitStreamSetObjectRequest request = new CommitStreamSetObjectRequest();
        request.setObjectId(-1);
        request.setStreamObjects(new ArrayList<>(List.of(object)));
        get(objects.commitStreamSetObject(request));
        return objectId;
    }

    static CommitStreamSetObjectRequest upload(long objectId, long streamId, long start, long end) {
        ObjectStreamRange range = new ObjectStreamRange();
        range.setStreamId(streamId);
        range.setEpoch(-1);
        range.setStartOffset(start);
        range.setEndOffset(end);
        CommitStreamSetObjectRequest request = new CommitStreamSetObjectRequest();
        request.setObjectId(objectId);
        request.setOrderId(objectId);
        request.setObjectSize(1000);
        request.setAttributes(0);
        request.setStreamRanges(new ArrayList<>(List.of(range)));
        return request;
    }

    static <T> T get(CompletableFuture<T> future) {
        try {
            return future.get(30, TimeUnit.SECONDS);
        } catch (ExecutionException error) {
            if (error.getCause() instanceof RuntimeException cause) {
                throw cause;
            }
            return Assertions.fail(error);
        } catch (InterruptedException | TimeoutException error) {
            return Assertions.fail(error);
        }
    }

    @Override
    public void close() {
        metadata.close();
    }
}
