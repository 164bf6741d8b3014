package io.streammeta.client;

import io.streammeta.client.MetadataChange.Event;
import io.streammeta.v1.DeletedKey;
import io.streammeta.v1.StoredKey;
import java.util.ArrayList;
import java.util.Collection;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Optional;
import java.util.Set;
import java.util.stream.LongStream;

/** Translation of the contract's changes. Kinds that the client does not know are left out. */
final class WatchedChanges {
    private final Set<EntityKind> kinds;
    private final List<MetadataChange> changes = new ArrayList<>();
    private long offset;

    private WatchedChanges(Set<EntityKind> kinds) {
        this.kinds = kinds;
    }

    /** Returns the changes of some kinds, or of all if there are none. */
    static List<MetadataChange> of(List<io.streammeta.v1.MetadataChange> received, Set<EntityKind> kinds) {
        WatchedChanges translation = new WatchedChanges(kinds.isEmpty() ? Set.of(EntityKind.values()) : kinds);
        received.forEach(translation::add);
        return translation.changes;
    }

    private void add(io.streammeta.v1.MetadataChange change) {
        offset = change.getOffset();
        switch (change.getKindCase()) {
            case STREAMS_CREATED -> change.getStreamsCreated()
                    .getStreamsList()
                    .forEach(stream -> addStream(stream.getStreamId(), Event.CREATED));
            case STREAMS_OPENED -> change.getStreamsOpened()
                    .getStreamsList()
                    .forEach(stream -> addStream(stream.getStreamId(), Event.OPENED));
            case STREAMS_REOPENED -> addStreams(change.getStreamsReopened().getStreamIdsList(), Event.OPENED);
            case STREAMS_CLOSED -> change.getStreamsClosed()
                    .getStreamsList()
                    .forEach(stream -> addStream(stream.getStreamId(), Event.CLOSED));
            case STREAMS_TRIMMED -> change.getStreamsTrimmed()
                    .getStreamsList()
                    .forEach(stream -> addStream(stream.getStreamId(), Event.TRIMMED));
            case STREAMS_DELETED -> addStreams(change.getStreamsDeleted().getStreamIdsList(), Event.DELETED);
            case UPLOADS_ABANDONED -> addStreams(change.getUploadsAbandoned().getStreamIdsList(), Event.ABANDONED);
            case STREAM_SET_OBJECTS_COMMITTED -> addStreamSetObjects(
                    change.getStreamSetObjectsCommitted().getObjectsList());
            case STREAM_OBJECTS_COMMITTED -> change.getStreamObjectsCommitted()
                    .getObjectsList()
                    .forEach(object -> addObject(object.getObjectId(), Event.COMMITTED));
            case NAMED_OBJECTS_COMMITTED -> change.getNamedObjectsCommitted()
                    .getObjectsList()
                    .forEach(object -> addObject(object.getObjectId(), Event.COMMITTED));
            case OBJECTS_PREPARED -> {
                long first = change.getObjectsPrepared().getFirstObjectId();
                LongStream.range(first, first + change.getObjectsPrepared().getCount())
                        .forEach(id -> addObject(id, Event.PREPARED));
            }
            case OBJECTS_DESTROYED -> addObjects(change.getObjectsDestroyed().getObjectIdsList(), Event.DESTROYED);
            case OBJECTS_REMOVED -> addObjects(change.getObjectsRemoved().getObjectIdsList(), Event.REMOVED);
            case OBJECTS_LINKED -> addObjects(change.getObjectsLinked().getObjectIdsList(), Event.LINKED);
            case NODE_REGISTERED -> addNode(change.getNodeRegistered().getNodeId());
            case NODE_EPOCH_CHANGED -> addNode(change.getNodeEpochChanged().getNodeId());
            case NODE_LOCK_CHANGED -> addNode(change.getNodeLockChanged().getNodeId());
            case NODE_SUPERVISED -> addNode(change.getNodeSupervised().getNodeId());
            case NODE_UNREGISTERED -> addNode(change.getNodeUnregistered().getNodeId());
            case RECOVERY_ASSIGNED -> addNode(change.getRecoveryAssigned().getNodeId());
            case KEYS_PUT -> change.getKeysPut().getKeysList().forEach(this::addPut);
            case KEYS_DELETED -> change.getKeysDeleted().getKeysList().forEach(this::addDeletion);
            default -> {
                // It changes no stream, object, node or key that the client reports.
            }
        }
    }

    private void addStreamSetObjects(List<io.streammeta.v1.StreamSetObject> objects) {
        Set<Long> streamIds = new LinkedHashSet<>();
        objects.forEach(object -> streamIds.addAll(object.getRanges().getStreamIdList()));
        addStreams(streamIds, Event.COMMITTED);
        objects.forEach(object -> addObject(object.getObjectId(), Event.COMMITTED));
    }

    private void addStreams(Collection<Long> streamIds, Event event) {
        streamIds.forEach(id -> addStream(id, event));
    }

    private void addObjects(Collection<Long> objectIds, Event event) {
        objectIds.forEach(id -> addObject(id, event));
    }

    private void addStream(long streamId, Event event) {
        // A commit changes objects and streams, perhaps only one kind is wanted.
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

    private void addPut(StoredKey put) {
        if (kinds.contains(EntityKind.KEY)) {
            KeyValue value = new KeyValue(put.getKey(), put.getValue().toByteArray(), put.getVersion());
            changes.add(new MetadataChange.Key(offset, put.getNamespace(), put.getKey(), Optional.of(value)));
        }
    }

    private void addDeletion(DeletedKey deleted) {
        if (kinds.contains(EntityKind.KEY)) {
            changes.add(
                    new MetadataChange.Key(offset, deleted.getNamespace(), deleted.getKey(), Optional.empty()));
        }
    }
}
