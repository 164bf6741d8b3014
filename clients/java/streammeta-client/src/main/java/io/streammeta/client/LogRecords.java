package io.streammeta.client;

import com.google.protobuf.ByteString;
import io.streammeta.client.MetadataChange.Event;
import io.streammeta.v1.KVsDeletedRecord;
import io.streammeta.v1.KVsPutRecord;
import io.streammeta.v1.Record;
import java.nio.ByteOrder;
import java.nio.LongBuffer;
import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.stream.LongStream;

/** Translation of the records of one log entry into changes. */
final class LogRecords {
    private final long offset;
    private final Set<EntityKind> kinds;
    private final List<MetadataChange> changes = new ArrayList<>();

    private LogRecords(long offset, Set<EntityKind> kinds) {
        this.offset = offset;
        this.kinds = kinds;
    }

    /** Returns the changes of some kinds, or of all if there are none. */
    static List<MetadataChange> changes(long offset, List<Record> records, Set<EntityKind> kinds) {
        LogRecords translation = new LogRecords(offset, kinds.isEmpty() ? Set.of(EntityKind.values()) : kinds);
        records.forEach(translation::add);
        return translation.changes;
    }

    private void add(Record record) {
        switch (record.getKindCase()) {
            case STREAMS_CREATED -> {
                var created = record.getStreamsCreated();
                LongStream.range(created.getFirstStreamId(), created.getFirstStreamId() + created.getCount())
                        .forEach(id -> addStream(id, Event.CREATED));
            }
            case STREAMS_OPENED -> addStreams(record.getStreamsOpened().getStreamId(), Event.OPENED);
            case STREAMS_REOPENED -> addStreams(record.getStreamsReopened().getStreamId(), Event.OPENED);
            case STREAMS_CLOSED -> addStreams(record.getStreamsClosed().getStreamId(), Event.CLOSED);
            case STREAMS_TRIMMED -> addStreams(record.getStreamsTrimmed().getStreamId(), Event.TRIMMED);
            case STREAMS_DELETED -> addStreams(record.getStreamsDeleted().getStreamId(), Event.DELETED);
            case UPLOADS_ABANDONED -> addStreams(record.getUploadsAbandoned().getStreamId(), Event.ABANDONED);
            case STREAM_SET_OBJECTS_COMMITTED -> {
                var committed = record.getStreamSetObjectsCommitted();
                addStreams(committed.getRanges().getStreamId(), Event.COMMITTED);
                addObjects(committed.getObjectId(), Event.COMMITTED);
            }
            case STREAM_OBJECTS_COMMITTED -> {
                addStreams(record.getStreamObjectsCommitted().getStreamId(), Event.COMMITTED);
                addObjects(record.getStreamObjectsCommitted().getObjectId(), Event.COMMITTED);
            }
            case NAMED_OBJECTS_COMMITTED -> addObjects(
                    record.getNamedObjectsCommitted().getObjectId(), Event.COMMITTED);
            case OBJECTS_PREPARED -> {
                var prepared = record.getObjectsPrepared();
                LongStream.range(prepared.getFirstObjectId(), prepared.getFirstObjectId() + prepared.getCount())
                        .forEach(id -> addObject(id, Event.PREPARED));
            }
            case OBJECTS_DESTROYED -> addObjects(record.getObjectsDestroyed().getObjectId(), Event.DESTROYED);
            case OBJECTS_REMOVED -> addObjects(record.getObjectsRemoved().getObjectId(), Event.REMOVED);
            case NODE_REGISTERED -> addNode(record.getNodeRegistered().getNodeId());
            case NODE_EPOCH_SET -> addNode(record.getNodeEpochSet().getNodeId());
            case NODE_LOCKED -> addNode(record.getNodeLocked().getNodeId());
            case NODE_SUPERVISED -> addNode(record.getNodeSupervised().getNodeId());
            case NODE_UNREGISTERED -> addNode(record.getNodeUnregistered().getNodeId());
            case RECOVERY_ASSIGNED -> addNode(record.getRecoveryAssigned().getNodeId());
            case KVS_PUT -> addPuts(record.getKvsPut());
            case KVS_DELETED -> addDeletions(record.getKvsDeleted());
            default -> {
                // The record changes no stream, object, node or key.
            }
        }
    }

    private void addPuts(KVsPutRecord put) {
        if (!kinds.contains(EntityKind.KEY)) {
            return;
        }
        for (int row = 0; row < put.getKeysCount(); row++) {
            String key = put.getKeys(row);
            // The version of a value is the offset of its log entry, plus 1.
            KeyValue value = new KeyValue(key, put.getValues(row).toByteArray(), offset + 1);
            changes.add(new MetadataChange.Key(offset, put.getNamespaces(row), key, Optional.of(value)));
        }
    }

    private void addDeletions(KVsDeletedRecord deleted) {
        if (!kinds.contains(EntityKind.KEY)) {
            return;
        }
        for (int row = 0; row < deleted.getKeysCount(); row++) {
            changes.add(new MetadataChange.Key(
                    offset, deleted.getNamespaces(row), deleted.getKeys(row), Optional.empty()));
        }
    }

    private void addStreams(ByteString column, Event event) {
        ids(column).forEach(id -> addStream(id, event));
    }

    private void addObjects(ByteString column, Event event) {
        ids(column).forEach(id -> addObject(id, event));
    }

    private void addStream(long streamId, Event event) {
        // The record of a commit has objects and streams, perhaps only one kind is wanted.
        if (kinds.contains(EntityKind.STREAM)) {
            changes.add(new MetadataChange.Stream(offset, streamId, event));
        }
    }

    private void addObject(long objectId, Event event) {
        if (kinds.contains(EntityKind.OBJECT)) {
            changes.add(new MetadataChange.Object(offset, objectId, event));
        }
    }

    private void addNode(int nodeId) {
        if (kinds.contains(EntityKind.NODE)) {
            changes.add(new MetadataChange.Node(offset, nodeId));
        }
    }

    /** Returns the ids of a column, each once. */
    private static Set<Long> ids(ByteString column) {
        LongBuffer numbers =
                column.asReadOnlyByteBuffer().order(ByteOrder.LITTLE_ENDIAN).asLongBuffer();
        Set<Long> ids = new LinkedHashSet<>();
        while (numbers.hasRemaining()) {
            ids.add(numbers.get());
        }
        return ids;
    }
}
