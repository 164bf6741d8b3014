package io.streammeta.pulsar;

import java.io.ByteArrayOutputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Random;
import org.apache.bookkeeper.client.BookKeeper.DigestType;
import org.apache.bookkeeper.client.LedgerHandle;
import org.apache.bookkeeper.client.PulsarMockBookKeeper;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.common.util.OrderedScheduler;
import org.apache.bookkeeper.mledger.LedgerOffloaderStatsDisable;
import org.apache.pulsar.common.policies.data.OffloadPoliciesImpl;

/** Ledgers of a BookKeeper in memory, and an offloader to copy them. */
final class Ledgers implements AutoCloseable {
    static final int BLOCK_BYTES = 5000;
    private static final byte[] PASSWORD = {};

    final OrderedScheduler scheduler =
            OrderedScheduler.newSchedulerBuilder().numThreads(2).name("offload").build();
    final PulsarMockBookKeeper bookKeeper;
    final StreammetaOffloaderFactory factory = new StreammetaOffloaderFactory();
    final Map<Long, List<byte[]>> bodies = new HashMap<>();

    Ledgers() throws Exception {
        bookKeeper = new PulsarMockBookKeeper(scheduler);
    }

    StreammetaOffloader offloader(List<String> endpoints, String bucket) throws Exception {
        OffloadPoliciesImpl policies = new OffloadPoliciesImpl();
        policies.setManagedLedgerOffloadDriver(StreammetaOffloader.DRIVER);
        policies.setManagedLedgerOffloadMaxBlockSizeInBytes(BLOCK_BYTES);
        policies.setManagedLedgerOffloadReadBufferSizeInBytes(1000);
        policies.setManagedLedgerExtraConfigurations(Map.of("Endpoints", String.join(",", endpoints), "Bucket", bucket));
        return factory.create(
                policies, Map.of("pulsarclustername", "test"), scheduler, LedgerOffloaderStatsDisable.INSTANCE);
    }

    /** Creates a closed ledger with entries of 0 to 999 bytes. */
    ReadHandle closed(int entries) throws Exception {
        LedgerHandle ledger = bookKeeper.createLedger(1, 1, 1, DigestType.CRC32C, PASSWORD);
        Random random = new Random(ledger.getId());
        List<byte[]> all = new ArrayList<>();
        for (int entry = 0; entry < entries; entry++) {
            byte[] body = new byte[entry % 50 == 7 ? 0 : random.nextInt(1000)];
            random.nextBytes(body);
            ledger.addEntry(body);
            all.add(body);
        }
        ledger.close();
        bodies.put(ledger.getId(), all);
        return open(ledger.getId());
    }

    ReadHandle open(long ledgerId) throws Exception {
        return bookKeeper
                .newOpenLedgerOp()
                .withLedgerId(ledgerId)
                .withPassword(PASSWORD)
                .withDigestType(org.apache.bookkeeper.client.api.DigestType.CRC32C)
                .execute()
                .get();
    }

    /** Returns the contents of a ledger as it was written, of these entries. */
    byte[] written(long ledgerId, int first, int last) {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        for (int entry = first; entry <= last; entry++) {
            append(out, entry, bodies.get(ledgerId).get(entry));
        }
        return out.toByteArray();
    }

    /** Returns the contents of these entries, as a handle reads them. */
    static byte[] read(ReadHandle handle, long first, long last) throws Exception {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        try (LedgerEntries entries = handle.readAsync(first, last).get()) {
            for (LedgerEntry entry : entries) {
                append(out, entry.getEntryId(), entry.getEntryBytes());
            }
        }
        return out.toByteArray();
    }

    private static void append(ByteArrayOutputStream out, long entry, byte[] body) {
        out.writeBytes((entry + ":" + body.length + ":").getBytes(StandardCharsets.US_ASCII));
        out.writeBytes(body);
    }

    @Override
    public void close() {
        factory.close();
        scheduler.shutdownNow();
    }
}
