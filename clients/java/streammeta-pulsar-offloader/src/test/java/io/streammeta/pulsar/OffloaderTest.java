package io.streammeta.pulsar;

import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.NamedObject;
import io.streammeta.client.ObjectState;
import io.streammeta.client.StreammetaClient;
import io.streammeta.client.errors.KeyNotFoundException;
import io.streammeta.store.ObjectKeys;
import io.streammeta.store.ObjectStore;
import io.streammeta.testkit.Controllers;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.pulsar.common.policies.data.OffloadPoliciesImpl;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.function.Executable;
import org.junit.jupiter.api.io.TempDir;

class OffloaderTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static final int ENTRIES = 400;
    private static final Map<String, String> LABELS = Map.of("ManagedLedgerName", "public/default/persistent/t");

    private static Ledgers ledgers;
    private static StreammetaOffloader offloader;
    private static StreammetaClient client;

    @BeforeAll
    static void open() throws Exception {
        ledgers = new Ledgers();
        offloader = ledgers.offloader(CONTROLLERS.endpoints(), CONTROLLERS.bucket());
        client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build();
    }

    @AfterAll
    static void close() {
        offloader.close();
        ledgers.close();
        client.close();
    }

    @Test
    void aCopyHasTheEntriesOfItsLedger() throws Exception {
        ReadHandle ledger = ledgers.closed(ENTRIES);
        ReadHandle copy = copyOf(ledger, UUID.randomUUID());
        ledgers.bookKeeper.deleteLedger(ledger.getId());

        assertEquals(ledger.getId(), copy.getId());
        assertEquals(ENTRIES - 1, copy.getLastAddConfirmed());
        assertEquals(ledger.getLength(), copy.getLength());
        assertTrue(copy.isClosed());
        assertArrayEquals(ledgers.written(ledger.getId(), 0, ENTRIES - 1), Ledgers.read(copy, 0, ENTRIES - 1));
    }

    @Test
    void anyRangeIsReadInAnyOrder() throws Exception {
        ReadHandle ledger = ledgers.closed(ENTRIES);
        ReadHandle copy = copyOf(ledger, UUID.randomUUID());

        Random random = new Random(1);
        for (int round = 0; round < 300; round++) {
            int first = random.nextInt(ENTRIES);
            int last = Math.min(ENTRIES - 1, first + random.nextInt(20));
            assertArrayEquals(ledgers.written(ledger.getId(), first, last), Ledgers.read(copy, first, last));
        }
        assertFailure(BKException.BKIncorrectParameterException.class, () -> copy.readAsync(0, ENTRIES)
                .get());
        assertFailure(BKException.BKIncorrectParameterException.class, () -> copy.readAsync(-1, 0).get());
        copy.close();
        assertFailure(ManagedLedgerException.OffloadReadHandleClosedException.class, () -> copy.readAsync(0, 0)
                .get());
    }

    @Test
    void aDeletedCopyIsGoneAndItsDeletionRepeatable() throws Exception {
        ReadHandle ledger = ledgers.closed(10);
        UUID uid = UUID.randomUUID();
        Map<String, String> metadata = offloader.getOffloadDriverMetadata();
        ReadHandle copy = copyOf(ledger, uid);

        for (int round = 0; round < 2; round++) {
            offloader.deleteOffloaded(ledger.getId(), uid, metadata).get();
            assertFailure(
                    BKException.BKNoSuchLedgerExistsException.class,
                    () -> offloader.readOffloaded(ledger.getId(), uid, metadata).get());
        }
        assertEquals(List.of(), await(client.namedObjects().list("pulsar/" + uid).toList()));
        assertEquals(List.of(), await(client.keyValues(NamedCopies.OWNERS).list("pulsar/" + uid).toList()));
        waitUntilReadsFail(copy);
    }

    @Test
    void anOpenOrEmptyLedgerIsRejected() throws Exception {
        ReadHandle empty = ledgers.closed(0);
        assertFailure(IllegalArgumentException.class, () -> offloader
                .offload(empty, UUID.randomUUID(), LABELS)
                .get());
    }

    /** What follows the deletion of its copy must not bring the copy back: nobody would delete it. */
    @Test
    void aDeletionDuringAnOffloadEndsIt() throws Exception {
        ReadHandle ledger = ledgers.closed(ENTRIES);
        UUID uid = UUID.randomUUID();
        List<Long> before = objectsInBucket();
        ledgers.bookKeeper.setReadHandleInterceptor((id, first, last, entries) -> first == 0
                ? CompletableFuture.completedFuture(entries)
                : offloader
                        .deleteOffloaded(id, uid, offloader.getOffloadDriverMetadata())
                        .thenApply(none -> entries));
        try {
            assertFailure(KeyNotFoundException.class, () -> offloader
                    .offload(ledgers.open(ledger.getId()), uid, LABELS)
                    .get());
        } finally {
            ledgers.bookKeeper.setReadHandleInterceptor(null);
        }
        assertEquals(List.of(), await(client.namedObjects().list("pulsar/" + uid).toList()));
        List<Long> left = objectsInBucket();
        left.removeAll(before);
        assertEquals(2, left.size()); // uploaded, but not committed: as after a crash at this point
        assertEquals(
                List.of(ObjectState.PREPARED, ObjectState.PREPARED), await(client.objects().check(left)));

        assertArrayEquals(
                ledgers.written(ledger.getId(), 0, ENTRIES - 1),
                Ledgers.read(copyOf(ledger, UUID.randomUUID()), 0, ENTRIES - 1));
    }

    @Test
    void aRepeatedOffloadSucceeds() throws Exception {
        ReadHandle ledger = ledgers.closed(30);
        UUID uid = UUID.randomUUID();
        offloader.offload(ledger, uid, LABELS).get();
        assertArrayEquals(ledgers.written(ledger.getId(), 0, 29), Ledgers.read(copyOf(ledger, uid), 0, 29));
    }

    @Test
    void aScanShowsBothObjectsOfACopy() throws Exception {
        ReadHandle ledger = ledgers.closed(3);
        UUID uid = UUID.randomUUID();
        copyOf(ledger, uid);

        List<String> found = new ArrayList<>();
        offloader.scanLedgers(
                object -> {
                    if (object.getUuid().equals(uid.toString())) {
                        found.add(object.getName() + " " + object.getLedgerId() + " "
                                + object.getUserMetadata().get("role"));
                    }
                    return true;
                },
                offloader.getOffloadDriverMetadata());
        String name = "pulsar/" + uid + "-ledger-" + ledger.getId();
        assertEquals(
                List.of(name + " " + ledger.getId() + " data", name + "-index " + ledger.getId() + " index"), found);

        int[] seen = {0};
        offloader.scanLedgers(object -> ++seen[0] < 1, Map.of());
        assertEquals(1, seen[0]);
    }

    @Test
    void thePythonShapeReadsACopyAndWritesTheSameBytes(@TempDir Path folder) throws Exception {
        ReadHandle ledger = ledgers.closed(ENTRIES);
        UUID uid = UUID.randomUUID();
        UUID other = UUID.randomUUID();
        copyOf(ledger, uid);

        MessageDigest digest = MessageDigest.getInstance("SHA-256");
        ledgers.bodies.get(ledger.getId()).forEach(digest::update);
        assertEquals(HexFormat.of().formatHex(digest.digest()), runShape(folder, uid, ledger.getId(), other));

        for (String end : List.of("", "-index")) {
            String suffix = "-ledger-" + ledger.getId() + end;
            assertArrayEquals(bytesOf("pulsar/" + uid + suffix), bytesOf("pulsar/" + other + suffix));
        }
        Map<String, String> metadata = offloader.getOffloadDriverMetadata();
        ReadHandle copy = offloader.readOffloaded(ledger.getId(), other, metadata).get();
        assertArrayEquals(ledgers.written(ledger.getId(), 0, ENTRIES - 1), Ledgers.read(copy, 0, ENTRIES - 1));
        offloader.deleteOffloaded(ledger.getId(), other, metadata).get();
        assertEquals(List.of(), await(client.namedObjects().list("pulsar/" + other).toList()));
    }

    @Test
    void filesOfKilledProcessesAreDeletedAndUsedOnesStay(@TempDir Path folder) throws Exception {
        Path abandoned = Files.createFile(folder.resolve("streammeta-offload-1.data"));
        Path foreign = Files.createFile(folder.resolve("other.data"));
        try (ScratchFile used = new ScratchFile(folder)) {
            ScratchFile.deleteAbandoned(folder);
            assertTrue(Files.exists(used.path()));
        }
        assertFalse(Files.exists(abandoned));
        assertTrue(Files.exists(foreign));
    }

    @Test
    void optionsOfTheBrokerServeNamespacesWithPoliciesOfTheirOwn() throws Exception {
        OffloadPoliciesImpl policies = new OffloadPoliciesImpl();
        try (StreammetaOffloaderFactory fresh = new StreammetaOffloaderFactory()) {
            assertThrows(IOException.class, () -> fresh.create(policies, Map.of(), ledgers.scheduler));
        }
        StreammetaOffloader second = ledgers.factory.create(policies, Map.of(), ledgers.scheduler);
        second.close();
        copyOf(ledgers.closed(1), UUID.randomUUID()); // the connection is still open
    }

    private static ReadHandle copyOf(ReadHandle ledger, UUID uid) throws Exception {
        offloader.offload(ledger, uid, LABELS).get();
        return offloader
                .readOffloaded(ledger.getId(), uid, offloader.getOffloadDriverMetadata())
                .get();
    }

    private static byte[] bytesOf(String name) {
        NamedObject object = await(client.namedObjects().describe(name)).orElseThrow();
        String namespace = await(client.describeCluster()).objectNamespace();
        try (ObjectStore store = ObjectStore.open(CONTROLLERS.bucket())) {
            return store.get(ObjectKeys.of(namespace, object.objectId()));
        }
    }

    private static List<Long> objectsInBucket() {
        try (ObjectStore store = ObjectStore.open(CONTROLLERS.bucket())) {
            return new ArrayList<>(store.list("")
                    .filter(object -> object.key().matches("[0-9a-f]{8,}/[^/]+/[0-9]+")) // the rest is the controllers'
                    .map(object -> Long.parseLong(object.key().replaceFirst(".*/", "")))
                    .toList());
        }
    }

    private static String runShape(Path folder, UUID uid, long ledgerId, UUID other) throws Exception {
        Path repository = Path.of(System.getProperty("streammeta.repository"));
        Path script = folder.resolve("shape.py");
        try (var resource = OffloaderTest.class.getResourceAsStream("shape.py")) {
            Files.copy(resource, script);
        }
        Process process = new ProcessBuilder(
                        repository.resolve(".venv/bin/python").toString(),
                        "-P",
                        script.toString(),
                        String.join(",", CONTROLLERS.endpoints()),
                        CONTROLLERS.bucket().replace("file://", ""),
                        OffloaderSettings.DEFAULT_PREFIX,
                        NamedCopies.OWNERS,
                        uid.toString(),
                        Long.toString(ledgerId),
                        other.toString())
                .redirectError(ProcessBuilder.Redirect.INHERIT)
                .start();
        String answer = new String(process.getInputStream().readAllBytes()).trim();
        assertEquals(0, process.waitFor());
        return answer;
    }

    /** The controllers delete the bytes of a destroyed object a moment later. */
    private static void waitUntilReadsFail(ReadHandle copy) throws InterruptedException {
        for (int round = 0; round < 200; round++) {
            try {
                for (int entry = 9; entry >= 0; entry--) { // more than the handle's buffer
                    copy.readAsync(entry, entry).get();
                }
            } catch (ExecutionException error) {
                assertInstanceOf(BKException.BKNoSuchLedgerExistsException.class, error.getCause());
                return;
            }
            Thread.sleep(50);
        }
        throw new AssertionError("the bytes of a deleted copy are still there");
    }

    private static void assertFailure(Class<? extends Throwable> type, Executable call) {
        ExecutionException error = assertThrows(ExecutionException.class, call);
        assertInstanceOf(type, error.getCause());
    }
}
