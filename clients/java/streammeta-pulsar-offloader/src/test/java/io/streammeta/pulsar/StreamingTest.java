package io.streammeta.pulsar;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertInstanceOf;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.testkit.Controllers;
import java.lang.reflect.Proxy;
import java.util.Map;
import java.util.Random;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.ExecutionException;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadHandle;
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadHandle.OfferEntryResult;
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadResult;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.bookkeeper.mledger.impl.EntryImpl;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.ManagedLedgerInfo.LedgerInfo;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.OffloadContext;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.OffloadSegment;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class StreamingTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static final int BODY = 300_000;

    private static Ledgers ledgers;
    private static StreammetaOffloader offloader;

    @BeforeAll
    static void open() throws Exception {
        ledgers = new Ledgers();
        offloader = ledgers.offloader(CONTROLLERS.endpoints(), CONTROLLERS.bucket());
    }

    @AfterAll
    static void close() {
        offloader.close();
        ledgers.close();
    }

    @Test
    void ledgersAreReadFromTheirSegments() throws Exception {
        Map<String, String> metadata = offloader.getOffloadDriverMetadata();
        UUID first = UUID.randomUUID();
        UUID second = UUID.randomUUID();

        OffloadHandle segment = begin(first, 1, 0);
        offer(segment, 1, 0, 40);
        offer(segment, 2, 0, 25);
        assertEquals(OfferEntryResult.FAIL_NOT_CONSECUTIVE, segment.offerEntry(entry(2, 26)));
        assertEquals(24, segment.lastOffered().getEntryId());
        assertTrue(segment.close());
        assertFalse(segment.close());
        assertEquals(OfferEntryResult.FAIL_SEGMENT_CLOSED, segment.offerEntry(entry(2, 25)));
        OffloadResult end = segment.getOffloadResultAsync().get();
        assertEquals("1:0 2:24", end.beginLedger + ":" + end.beginEntry + " " + end.endLedger + ":" + end.endEntry);

        OffloadHandle next = begin(second, 2, 25);
        offer(next, 2, 25, 200);
        next.close();
        next.getOffloadResultAsync().get();

        ReadHandle one = offloader.readOffloaded(1, context(first), metadata).get();
        assertBodies(one, 1, 0, 39);
        ReadHandle two = offloader.readOffloaded(2, context(first, second), metadata).get();
        assertEquals(199, two.getLastAddConfirmed());
        assertBodies(two, 2, 0, 199);
        assertBodies(two, 2, 20, 30);
        assertBodies(two, 2, 190, 190);

        offloader.deleteOffloaded(first, metadata).get();
        offloader.deleteOffloaded(first, metadata).get();
        ExecutionException error = assertThrows(ExecutionException.class, () -> offloader
                .readOffloaded(1, context(first), metadata)
                .get());
        assertInstanceOf(BKException.BKNoSuchLedgerExistsException.class, error.getCause());
    }

    @Test
    void aSegmentWithoutEntriesFails() throws Exception {
        OffloadHandle segment = begin(UUID.randomUUID(), 5, 0);
        segment.close();
        assertThrows(ExecutionException.class, () -> segment.getOffloadResultAsync().get());
    }

    private static OffloadHandle begin(UUID uid, long ledger, long entry) throws Exception {
        return offloader
                .streamingOffload(managedLedger(), uid, ledger, entry, offloader.getOffloadDriverMetadata())
                .get();
    }

    /** Offers entries up to an end, and waits while the buffer is full. */
    private static void offer(OffloadHandle segment, long ledger, int first, int end) throws InterruptedException {
        for (int entry = first; entry < end; entry++) {
            OfferEntryResult result = segment.offerEntry(entry(ledger, entry));
            while (result == OfferEntryResult.FAIL_BUFFER_FULL) {
                Thread.sleep(5);
                result = segment.offerEntry(entry(ledger, entry));
            }
            assertEquals(OfferEntryResult.SUCCESS, result);
        }
    }

    private static void assertBodies(ReadHandle handle, long ledger, int first, int last) throws Exception {
        try (var entries = handle.readAsync(first, last).get()) {
            int expected = first;
            for (var entry : entries) {
                assertEquals(expected, entry.getEntryId());
                assertArrayEquals(body(ledger, expected), entry.getEntryBytes());
                expected++;
            }
            assertEquals(last + 1, expected);
        }
    }

    private static Entry entry(long ledger, int entry) {
        return EntryImpl.create(ledger, entry, body(ledger, entry));
    }

    private static byte[] body(long ledger, int entry) {
        byte[] body = new byte[BODY];
        new Random(ledger * 1000 + entry).nextBytes(body);
        return body;
    }

    private static OffloadContext context(UUID... segments) {
        OffloadContext.Builder context = OffloadContext.newBuilder();
        for (UUID uid : segments) {
            context.addOffloadSegment(OffloadSegment.newBuilder()
                    .setUidMsb(uid.getMostSignificantBits())
                    .setUidLsb(uid.getLeastSignificantBits())
                    .setComplete(true));
        }
        return context.build();
    }

    /** A managed ledger that knows nothing of its ledgers but their ids. */
    private static ManagedLedger managedLedger() {
        return (ManagedLedger) Proxy.newProxyInstance(
                StreamingTest.class.getClassLoader(),
                new Class<?>[] {ManagedLedger.class},
                (proxy, method, arguments) -> method.getName().equals("getName")
                        ? "public/default/persistent/s"
                        : CompletableFuture.completedFuture(LedgerInfo.newBuilder()
                                .setLedgerId((long) arguments[0])
                                .build()));
    }
}
