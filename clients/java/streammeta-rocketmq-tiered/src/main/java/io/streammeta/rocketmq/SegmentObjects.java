package io.streammeta.rocketmq;

import io.streammeta.client.BrokerSession;
import io.streammeta.client.NamedObject;
import io.streammeta.client.NamedObjectToCommit;
import io.streammeta.client.ObjectOwner;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.KeyConflictException;
import io.streammeta.store.ObjectKeys;
import io.streammeta.store.ObjectStore;
import java.io.IOException;
import java.io.InputStream;
import java.io.UncheckedIOException;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.zip.CRC32C;

/** Parts of segments as named objects, owned by the segment's key. All calls block. */
final class SegmentObjects {
    /** A larger commit becomes several parts, so that memory contains one of them at a time. */
    static final int PART_MAX_BYTES = 32 << 20;

    private static final String NAMES = "rocketmq-tiered/";
    /** An object of a commit that never ended is deleted after this time. */
    private static final Duration TIME_TO_COMMIT = Duration.ofMinutes(30);
    private static final int NAMES_PER_CALL = 1_000;

    private final StreammetaClient client;
    private final BrokerSession session;
    private final ObjectStore store;
    private final String objectNamespace;
    private final TierKeys keys;
    private final String names;

    SegmentObjects(
            StreammetaClient client,
            BrokerSession session,
            ObjectStore store,
            String objectNamespace,
            TierKeys keys,
            String prefix) {
        this.client = client;
        this.session = session;
        this.store = store;
        this.objectNamespace = objectNamespace;
        this.keys = keys;
        this.names = NAMES + prefix;
    }

    /**
     * Lists the parts of a segment.
     *
     * @throws IllegalStateException if bytes are missing between them
     */
    SegmentParts list(SegmentName segment) {
        String prefix = segment.partPrefix(names);
        SegmentParts parts = new SegmentParts();
        StreammetaClient.await(client.namedObjects().list(prefix).forEach(part -> {
            long position = Long.parseLong(part.name().substring(prefix.length()));
            if (position != parts.size()) {
                throw new IllegalStateException("part '" + part.name() + "' follows a part that ends at " + parts.size()
                        + ". Reconcile the bucket, and delete the topic if bytes are missing");
            }
            parts.append(part.objectId(), part.size());
        }));
        return parts;
    }

    /**
     * Commits bytes as parts from a position on, all or none, and returns them. A repeat succeeds if an earlier attempt
     * has taken effect.
     */
    List<NamedObjectToCommit> commit(SegmentName segment, long position, InputStream bytes, int length) {
        List<NamedObjectToCommit> parts = upload(segment, position, bytes, length);
        try {
            StreammetaClient.await(session.namedObjects().commit(parts));
            return parts;
        } catch (KeyConflictException conflict) {
            return committedBefore(parts, conflict);
        }
    }

    /** Commits bytes as the whole segment, in place of its parts, and returns the new ones. */
    List<NamedObjectToCommit> replace(SegmentName segment, InputStream bytes, int length) {
        List<NamedObjectToCommit> parts = upload(segment, 0, bytes, length);
        deleteParts(segment);
        StreammetaClient.await(session.namedObjects().commit(parts));
        return parts;
    }

    /** Reads a range of a part into {@code target}. */
    void read(SegmentParts.Slice slice, ByteBuffer target) {
        byte[] bytes = store.getRange(
                ObjectKeys.of(objectNamespace, slice.objectId()), slice.start(), slice.start() + slice.length());
        if (bytes.length != slice.length()) {
            throw new IllegalStateException("object " + slice.objectId() + " ends after " + (slice.start() + bytes.length)
                    + " bytes. Reconcile the bucket");
        }
        target.put(bytes);
    }

    /** Deletes a segment: its parts, and then its key, with parts that were committed meanwhile. */
    void destroy(SegmentName segment) {
        deleteParts(segment);
        keys.delete(segment.key());
    }

    private List<NamedObjectToCommit> upload(SegmentName segment, long position, InputStream bytes, int length) {
        int count = (length + PART_MAX_BYTES - 1) / PART_MAX_BYTES;
        List<Long> ids = StreammetaClient.await(session.objects().prepare(count, TIME_TO_COMMIT)).ids();
        ObjectOwner owner = keys.owner(segment.key());
        String prefix = segment.partPrefix(names);

        List<NamedObjectToCommit> parts = new ArrayList<>();
        for (int part = 0; part < count; part++) {
            int start = part * PART_MAX_BYTES;
            byte[] chunk = read(bytes, Math.min(PART_MAX_BYTES, length - start));
            CRC32C checksum = new CRC32C();
            checksum.update(chunk);
            store.put(ObjectKeys.of(objectNamespace, ids.get(part)), ByteBuffer.wrap(chunk));
            parts.add(new NamedObjectToCommit(
                    ids.get(part),
                    prefix + SegmentName.padded(position + start),
                    chunk.length,
                    OptionalLong.of(checksum.getValue()),
                    owner,
                    Map.of()));
        }
        return parts;
    }

    private static byte[] read(InputStream bytes, int length) {
        try {
            byte[] chunk = bytes.readNBytes(length);
            if (chunk.length != length) {
                throw new IllegalStateException(
                        "the broker passed " + chunk.length + " bytes, expected " + length + ". It will retry the commit");
            }
            return chunk;
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** Returns the parts that have the same names and bytes, or throws the conflict. */
    private List<NamedObjectToCommit> committedBefore(List<NamedObjectToCommit> parts, KeyConflictException conflict) {
        List<NamedObject> found = StreammetaClient.await(
                client.namedObjects().describe(parts.stream().map(NamedObjectToCommit::name).toList()));
        if (found.size() != parts.size()) {
            throw conflict;
        }
        List<NamedObjectToCommit> earlier = new ArrayList<>();
        for (int part = 0; part < parts.size(); part++) {
            NamedObject stored = found.get(part);
            NamedObjectToCommit own = parts.get(part);
            if (stored.size() != own.size() || !stored.crc32c().equals(own.crc32c())) {
                throw conflict;
            }
            earlier.add(new NamedObjectToCommit(
                    stored.objectId(), own.name(), own.size(), own.crc32c(), own.owner(), own.metadata()));
        }
        return earlier;
    }

    /** Deletes parts, last ones first, so that those that stay have no gap. Controllers reject a replaced process. */
    private void deleteParts(SegmentName segment) {
        List<String> parts = new ArrayList<>();
        StreammetaClient.await(
                client.namedObjects().list(segment.partPrefix(names)).forEach(part -> parts.add(part.name())));
        for (int end = parts.size(); end > 0; end -= NAMES_PER_CALL) {
            List<String> last = parts.subList(Math.max(0, end - NAMES_PER_CALL), end);
            StreammetaClient.await(session.namedObjects().delete(last));
        }
    }
}
