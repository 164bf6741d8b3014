package io.streammeta.client;

import io.streammeta.v1.CommitStreamSetObjectRequest;
import io.streammeta.v1.OnConflict;
import java.util.ArrayList;
import java.util.List;
import java.util.OptionalLong;

/**
 * A commit of a stream set object and stream objects: an upload, or the result of a compaction. It is identified by its
 * object ids: a repeat with the same content gets the first answer.
 */
public final class Commit {
    private final OptionalLong objectId;
    private final OptionalLong orderId;
    private final ObjectFacts facts;
    private final List<StreamSlice> ranges;
    private final List<NewStreamObject> streamObjects;
    private final List<Long> compactedObjectIds;
    private final List<ValueToPut> values;
    private final List<StreamToTrim> trims;
    private final OnConflict onConflict;

    private Commit(Builder builder) {
        objectId = builder.objectId;
        orderId = builder.orderId;
        facts = builder.facts;
        ranges = List.copyOf(builder.ranges);
        streamObjects = List.copyOf(builder.streamObjects);
        compactedObjectIds = List.copyOf(builder.compactedObjectIds);
        values = List.copyOf(builder.values);
        trims = List.copyOf(builder.trims);
        onConflict = builder.onConflict;
    }

    /** Returns the builder of a commit of a stream set object, with a prepared id. */
    public static Builder of(long objectId, ObjectFacts facts) {
        return new Builder(OptionalLong.of(objectId), facts);
    }

    /** Returns the builder of a commit without a stream set object, or of one that only removes compacted ones. */
    public static Builder ofStreamObjects() {
        return new Builder(OptionalLong.empty(), ObjectFacts.ofSize(0));
    }

    int rows() {
        return 1 + ranges.size() + streamObjects.size() + compactedObjectIds.size();
    }

    String subject() {
        return objectId.isPresent()
                ? "commit of object " + objectId.getAsLong()
                : "commit of " + streamObjects.size() + " stream objects";
    }

    CommitStreamSetObjectRequest toWire(Caller caller) {
        CommitStreamSetObjectRequest.Builder request = CommitStreamSetObjectRequest.newBuilder()
                .setNode(caller.owner())
                .setObjectSize(facts.size())
                .setAttributes(facts.attributes())
                .setRanges(StreamSlice.toWire(ranges))
                .setStreamObjects(NewStreamObject.toWire(streamObjects))
                .addAllCompactedObjectIds(compactedObjectIds)
                .addAllKvPuts(values.stream().map(ValueToPut::toWire).toList())
                .addAllTrims(trims.stream().map(StreamToTrim::toWire).toList())
                .setOnConflict(onConflict);
        objectId.ifPresent(request::setObjectId);
        orderId.ifPresent(request::setOrderId);
        facts.minTimestampMs().ifPresent(request::setMinTimestampMs);
        facts.maxTimestampMs().ifPresent(request::setMaxTimestampMs);
        facts.crc32c().ifPresent(crc -> request.setCrc32C((int) crc));
        if (caller.isRecovering()) {
            request.setFailover(true);
            // A compaction in the name of a dead node is no recovery of it.
            if (compactedObjectIds.isEmpty()) {
                request.setRecoverer(caller.self().toWire());
            }
        }
        return request.build();
    }

    /** Content of a commit. */
    public static final class Builder {
        private final OptionalLong objectId;
        private final ObjectFacts facts;
        private final List<StreamSlice> ranges = new ArrayList<>();
        private final List<NewStreamObject> streamObjects = new ArrayList<>();
        private final List<Long> compactedObjectIds = new ArrayList<>();
        private final List<ValueToPut> values = new ArrayList<>();
        private final List<StreamToTrim> trims = new ArrayList<>();
        private OptionalLong orderId = OptionalLong.empty();
        private OnConflict onConflict = OnConflict.ON_CONFLICT_REJECT_ALL;

        private Builder(OptionalLong objectId, ObjectFacts facts) {
            this.objectId = objectId;
            this.facts = facts;
        }

        /** Adds a range of the stream set object. They are sorted by stream id, then by start offset. */
        public Builder range(StreamSlice range) {
            ranges.add(range);
            return this;
        }

        /** Adds a stream object that was written with it. */
        public Builder streamObject(NewStreamObject object) {
            streamObjects.add(object);
            return this;
        }

        /** Adds the stream set objects that this commit replaces. */
        public Builder compacts(List<Long> objectIds) {
            compactedObjectIds.addAll(objectIds);
            return this;
        }

        /** Sets the position among the node's stream set objects. The default is the right one. */
        public Builder orderId(long orderId) {
            this.orderId = OptionalLong.of(orderId);
            return this;
        }

        /** Adds a value that is put if and only if the commit is made. */
        public Builder put(ValueToPut value) {
            values.add(value);
            return this;
        }

        /** Adds a trim that is made if and only if the commit is made. */
        public Builder trim(StreamToTrim stream) {
            trims.add(stream);
            return this;
        }

        /** Commits the valid ranges although others conflict. By default one bad range rejects the commit. */
        public Builder acceptValid() {
            onConflict = OnConflict.ON_CONFLICT_ACCEPT_VALID;
            return this;
        }

        /** Returns the commit. */
        public Commit build() {
            return new Commit(this);
        }
    }
}
