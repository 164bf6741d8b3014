package io.streammeta.automq;

import com.automq.stream.s3.compact.CompactOperations;
import com.automq.stream.s3.objects.CommitStreamSetObjectRequest;
import com.automq.stream.s3.objects.CompactStreamObjectRequest;
import com.automq.stream.s3.objects.ObjectStreamRange;
import com.automq.stream.s3.objects.StreamObject;
import io.streammeta.client.Commit;
import io.streammeta.client.NewStreamObject;
import io.streammeta.client.ObjectFacts;
import io.streammeta.client.OffsetRange;
import io.streammeta.client.StreamObjectCommit;
import io.streammeta.client.StreamSlice;
import java.util.List;
import java.util.Optional;
import java.util.stream.IntStream;

/** Commits of s3stream as those of the controllers. */
final class Commits {
    /** Stands for no object. */
    private static final long NO_OBJECT = -1;

    private Commits() {}

    static Commit of(CommitStreamSetObjectRequest request) {
        Commit.Builder commit = request.getObjectId() == NO_OBJECT
                ? Commit.ofStreamObjects()
                : Commit.of(request.getObjectId(), facts(request.getObjectSize(), request.getAttributes()));
        request.getStreamRanges().forEach(range -> commit.range(slice(range)));
        request.getStreamObjects().forEach(object -> commit.streamObject(streamObject(object)));
        // The order is the controllers' own, which is the same: the smallest of the sources, else the object's id.
        return commit.compacts(request.getCompactedObjectIds()).build();
    }

    static StreamObjectCommit of(CompactStreamObjectRequest request) {
        Optional<StreamObjectCommit.Result> result = request.getObjectId() == NO_OBJECT
                ? Optional.empty()
                : Optional.of(new StreamObjectCommit.Result(
                        request.getObjectId(),
                        new OffsetRange(request.getStartOffset(), request.getEndOffset()),
                        facts(request.getObjectSize(), request.getAttributes())));
        List<Long> sourceIds = request.getSourceObjectIds();
        List<StreamObjectCommit.Source> sources = IntStream.range(0, sourceIds.size())
                .mapToObj(row -> new StreamObjectCommit.Source(
                        sourceIds.get(row), operation(request.getOperations().get(row))))
                .toList();
        return new StreamObjectCommit(request.getStreamId(), request.getStreamEpoch(), result, sources);
    }

    private static StreamSlice slice(ObjectStreamRange range) {
        // s3stream fills in no epoch of an upload: the node's own epoch fences it.
        long epoch = range.getEpoch() < 0 ? StreamSlice.UNCHECKED : range.getEpoch();
        return new StreamSlice(range.getStreamId(), epoch, range.getStartOffset(), range.getEndOffset());
    }

    private static NewStreamObject streamObject(StreamObject object) {
        return new NewStreamObject(
                object.getObjectId(),
                new StreamSlice(
                        object.getStreamId(), StreamSlice.UNCHECKED, object.getStartOffset(), object.getEndOffset()),
                facts(object.getObjectSize(), object.getAttributes()));
    }

    /** Returns the facts of an object. The words of attributes are the same in s3stream and in docs/format.md. */
    private static ObjectFacts facts(long size, int attributes) {
        return ObjectFacts.ofSize(size).withAttributes(attributes);
    }

    private static StreamObjectCommit.Operation operation(CompactOperations operation) {
        return switch (operation) {
            case DELETE -> StreamObjectCommit.Operation.DELETE;
            case KEEP_DATA -> StreamObjectCommit.Operation.KEEP_DATA;
            case DEEP_DELETE -> StreamObjectCommit.Operation.DEEP_DELETE;
        };
    }
}
