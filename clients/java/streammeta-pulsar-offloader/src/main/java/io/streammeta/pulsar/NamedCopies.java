package io.streammeta.pulsar;

import static io.streammeta.client.StreammetaClient.await;

import io.streammeta.client.BrokerSession;
import io.streammeta.client.KeyValues;
import io.streammeta.client.NamedObject;
import io.streammeta.client.NamedObjectToCommit;
import io.streammeta.client.ObjectOwner;
import io.streammeta.client.Pages;
import io.streammeta.client.errors.KeyConflictException;
import io.streammeta.store.ObjectNotFoundException;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;
import java.util.function.Function;
import java.util.stream.Collectors;
import java.util.zip.CRC32C;
import org.apache.bookkeeper.client.BKException;

/**
 * Copies as pairs of named objects, a data object and its index, both owned by a key with the name of the data object.
 *
 * <p>The key is put before anything else and deleted to delete the copy, so a commit that arrives after the deletion of
 * its copy is rejected: a deleted copy never comes back. Both objects are committed in one call. What was uploaded but
 * not committed expires.
 */
final class NamedCopies {
    /** Namespace of the keys that own copies. */
    static final String OWNERS = "pulsar-copies";

    private static final String INDEX = "-index";
    private static final String ROLE = "role";
    private static final String VERSION = "s3managedledgeroffloaderformatversion";
    private static final String KNOWN_VERSION = "1";
    /** Time to upload a copy, after which it is abandoned. */
    private static final Duration TIME_TO_COMMIT = Duration.ofHours(6);

    private final Cluster cluster;

    NamedCopies(Cluster cluster) {
        this.cluster = cluster;
    }

    private KeyValues owners() {
        return cluster.client().keyValues(OWNERS);
    }

    /** Begins a copy: from now on it can be deleted, and a deletion ends it. Blocks. */
    void begin(String name, String ledgerName) {
        await(owners().put(name, ledgerName.getBytes(StandardCharsets.UTF_8)));
    }

    /**
     * Uploads and commits a copy that was begun. Blocks.
     *
     * @throws io.streammeta.client.errors.KeyNotFoundException if it was deleted meanwhile
     */
    void commit(String name, ScratchFile data, byte[] index, Map<String, String> labels) throws IOException {
        data.flush();
        BrokerSession session = cluster.session();
        List<Long> ids = await(session.objects().prepare(2, TIME_TO_COMMIT)).ids();
        cluster.store().put(cluster.keyOf(ids.get(0)), data.path());
        cluster.store().put(cluster.keyOf(ids.get(1)), ByteBuffer.wrap(index));

        ObjectOwner owner = new ObjectOwner.Key(OWNERS, name);
        OptionalLong dataCrc = OptionalLong.of(data.crc32c());
        OptionalLong indexCrc = OptionalLong.of(crc32c(index));
        NamedObjectToCommit dataObject = new NamedObjectToCommit(
                ids.get(0), name, data.size(), dataCrc, owner, labelsOf("data", labels));
        NamedObjectToCommit indexObject = new NamedObjectToCommit(
                ids.get(1), name + INDEX, index.length, indexCrc, owner, labelsOf("index", labels));
        try {
            await(session.namedObjects().commit(List.of(dataObject, indexObject)));
        } catch (KeyConflictException error) {
            // An earlier attempt, whose answer was lost, committed the same bytes. Those of this one expire.
            Map<String, NamedObject> found = describe(name);
            boolean isRepeat = found.size() == 2
                    && found.get(name).crc32c().equals(dataCrc)
                    && found.get(name + INDEX).crc32c().equals(indexCrc);
            if (!isRepeat) {
                throw error;
            }
        }
    }

    private Map<String, NamedObject> describe(String name) {
        return await(cluster.client().namedObjects().describe(List.of(name, name + INDEX))).stream()
                .collect(Collectors.toMap(NamedObject::name, Function.identity()));
    }

    /**
     * Finds a copy and reads its index. Blocks.
     *
     * @throws BKException.BKNoSuchLedgerExistsException if there is none
     * @throws IOException if the index is damaged or of an unknown version
     */
    Copy open(String name) throws IOException, BKException {
        Map<String, NamedObject> found = describe(name);
        NamedObject index = found.get(name + INDEX);
        if (index == null || !found.containsKey(name)) {
            throw new BKException.BKNoSuchLedgerExistsException();
        }
        if (!KNOWN_VERSION.equals(index.metadata().get(VERSION))) {
            throw new IOException("copy '" + name + "' has format version '"
                    + index.metadata().get(VERSION) + "', expected " + KNOWN_VERSION + ". Upgrade the offloader");
        }

        try {
            byte[] bytes = cluster.store().get(cluster.keyOf(index.objectId()));
            if (index.crc32c().isPresent() && index.crc32c().getAsLong() != crc32c(bytes)) {
                throw new IOException("index of copy '" + name + "' is damaged. Restore object " + index.objectId());
            }
            return new Copy(cluster.keyOf(found.get(name).objectId()), bytes);
        } catch (ObjectNotFoundException deletedMeanwhile) {
            throw new BKException.BKNoSuchLedgerExistsException();
        }
    }

    /**
     * A copy.
     *
     * @param dataKey the key of the data object in the bucket
     * @param index the bytes of the index object
     */
    record Copy(String dataKey, byte[] index) {}

    /** Deletes a copy, whole or not. A copy that does not exist counts as deleted. */
    CompletableFuture<Void> delete(String name) {
        return owners().delete(name);
    }

    /** Lists the objects of all copies whose names begin with a prefix. */
    Pages<NamedObject> list(String prefix) {
        return cluster.client().namedObjects().list(prefix);
    }

    /** Returns the key of an object's bytes in the bucket. Blocks. */
    String keyOf(NamedObject object) {
        return cluster.keyOf(object.objectId());
    }

    private static Map<String, String> labelsOf(String role, Map<String, String> labels) {
        Map<String, String> all = new HashMap<>(labels);
        all.put(ROLE, role);
        all.put(VERSION, KNOWN_VERSION);
        return all;
    }

    private static long crc32c(byte[] bytes) {
        CRC32C checksum = new CRC32C();
        checksum.update(bytes);
        return checksum.getValue();
    }
}
