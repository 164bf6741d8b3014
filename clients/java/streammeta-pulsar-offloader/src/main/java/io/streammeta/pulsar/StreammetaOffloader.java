package io.streammeta.pulsar;

import static io.streammeta.client.StreammetaClient.await;

import io.streammeta.client.NamedObject;
import io.streammeta.client.Page;
import io.streammeta.client.Pages;
import io.streammeta.client.errors.StreammetaException;
import java.io.IOException;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.NavigableMap;
import java.util.OptionalLong;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.common.util.OrderedScheduler;
import org.apache.bookkeeper.mledger.LedgerOffloader;
import org.apache.bookkeeper.mledger.LedgerOffloaderStats;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.bookkeeper.mledger.OffloadedLedgerMetadata;
import org.apache.bookkeeper.mledger.OffloadedLedgerMetadataConsumer;
import org.apache.bookkeeper.mledger.offload.OffloadUtils;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.OffloadContext;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.OffloadSegment;
import org.apache.bookkeeper.proto.DataFormats.LedgerMetadataFormat;
import org.apache.pulsar.common.policies.data.OffloadPolicies;
import org.apache.pulsar.common.policies.data.OffloadPoliciesImpl;

/**
 * Copies closed ledgers to the bucket of a streammeta cluster, reads them and deletes them.
 *
 * <p>The bytes of the objects are those of Pulsar's own offloaders. Each step may be repeated after a failure.
 */
public final class StreammetaOffloader implements LedgerOffloader {
    /** Value of {@code managedLedgerOffloadDriver}. */
    public static final String DRIVER = "streammeta";

    private static final String PREFIX = "prefix";
    private static final String MANAGED_LEDGER = "ManagedLedgerName";
    private static final Pattern LEDGER = Pattern.compile("(.{36})-ledger-(\\d+)(?:-index)?");
    private static final int DEFAULT_BLOCK_BYTES = 64 << 20;
    private static final int DEFAULT_BUFFER_BYTES = 1 << 20;
    /** Bounds of one read of a ledger that is copied. */
    private static final int READ_ENTRIES = 100;

    private static final int READ_BYTES = 4 << 20;

    private final Cluster cluster;
    private final NamedCopies copies;
    private final OffloaderSettings settings;
    private final OffloadPoliciesImpl policies;
    private final Map<String, String> labels;
    private final OrderedScheduler scheduler;
    private final LedgerOffloaderStats stats;
    private final Runnable onClose;

    StreammetaOffloader(
            Cluster cluster,
            OffloaderSettings settings,
            OffloadPoliciesImpl policies,
            Map<String, String> labels,
            OrderedScheduler scheduler,
            LedgerOffloaderStats stats,
            Runnable onClose) {
        this.cluster = cluster;
        this.copies = new NamedCopies(cluster);
        this.settings = settings;
        this.policies = policies;
        this.labels = Map.copyOf(labels);
        this.scheduler = scheduler;
        this.stats = stats;
        this.onClose = onClose;
    }

    @Override
    public String getOffloadDriverName() {
        return DRIVER;
    }

    /** Returns the prefix of names, which Pulsar keeps with each ledger: copies are found after it was changed. */
    @Override
    public Map<String, String> getOffloadDriverMetadata() {
        return Map.of(PREFIX, settings.prefix());
    }

    @Override
    public OffloadPolicies getOffloadPolicies() {
        return policies;
    }

    @Override
    public CompletableFuture<Void> offload(ReadHandle ledger, UUID uid, Map<String, String> extraMetadata) {
        return Tasks.run(scheduler.chooseThread(ledger.getId()), () -> {
            copy(ledger, uid, extraMetadata);
            return null;
        });
    }

    private void copy(ReadHandle ledger, UUID uid, Map<String, String> extraMetadata) throws Exception {
        // The copy of an open ledger would miss later entries.
        if (!ledger.isClosed() || ledger.getLastAddConfirmed() < 0 || ledger.getLength() <= 0) {
            throw new IllegalArgumentException("ledger " + ledger.getId() + " is open or empty, expected a closed one");
        }

        String ledgerName = extraMetadata.getOrDefault(MANAGED_LEDGER, "");
        String name = nameOf(uid, ledger.getId(), getOffloadDriverMetadata());
        copies.begin(name, ledgerName);
        try (ScratchFile data = new ScratchFile(settings.workDirectory())) {
            BlockWriter blocks = new BlockWriter(data);
            writeEntries(ledger, blocks);
            byte[] metadata = OffloadUtils.buildLedgerMetadataFormat(ledger.getLedgerMetadata());
            byte[] index = LedgerIndex.of(metadata, data.size(), blocks.blocks()).encode();
            copies.commit(name, data, index, with(extraMetadata));
            stats.recordOffloadBytes(ledgerName, data.size());
        } catch (Exception error) {
            stats.recordOffloadError(ledgerName);
            throw error;
        }
    }

    private void writeEntries(ReadHandle ledger, BlockWriter blocks) throws Exception {
        long last = ledger.getLastAddConfirmed();
        long bytesLeft = ledger.getLength();
        long average = Math.max(1, bytesLeft / (last + 1));
        long count = Math.max(1, Math.min(READ_ENTRIES, READ_BYTES / average));

        long next = 0;
        while (next <= last) {
            try (LedgerEntries entries = ledger.read(next, Math.min(last, next + count - 1))) {
                for (LedgerEntry entry : entries) {
                    int length = entry.getEntryBuffer().readableBytes();
                    if (entry.getEntryId() != next) {
                        throw new IOException("ledger " + ledger.getId() + " returned entry " + entry.getEntryId()
                                + ", expected " + next + ". Check its bookies");
                    }
                    if (!blocks.hasRoom(length)) {
                        blocks.end();
                        blocks.begin(blockLength(last - next + 1, bytesLeft), next, OptionalLong.empty());
                    }
                    if (!blocks.hasRoom(length)) {
                        throw new IOException("entry " + next + " of ledger " + ledger.getId() + " has " + length
                                + " bytes and fits into no block. Raise managedLedgerOffloadMaxBlockSizeInBytes");
                    }
                    blocks.add(next, entry.getEntryBuffer());
                    bytesLeft -= length;
                    next++;
                }
            }
        }
        blocks.end();
    }

    private long blockLength(long entriesLeft, long bytesLeft) {
        Integer most = policies.getManagedLedgerOffloadMaxBlockSizeInBytes();
        long needed = BlockWriter.HEADER_BYTES + BlockWriter.ENTRY_HEADER_BYTES * entriesLeft + bytesLeft;
        return Math.min(most == null ? DEFAULT_BLOCK_BYTES : most, needed);
    }

    @Override
    public CompletableFuture<OffloadHandle> streamingOffload(
            ManagedLedger managedLedger, UUID uid, long beginLedger, long beginEntry, Map<String, String> driverMetadata) {
        return Tasks.run(scheduler.chooseThread(beginLedger), () -> {
            String name = nameOf(uid, driverMetadata);
            copies.begin(name, managedLedger.getName());
            Map<String, String> all = with(Map.of(MANAGED_LEDGER, managedLedger.getName()));
            return new StreamingSegment(
                    managedLedger,
                    beginLedger,
                    beginEntry,
                    new ScratchFile(settings.workDirectory()),
                    (data, index) -> copies.commit(name, data, index, all),
                    scheduler);
        });
    }

    @Override
    public CompletableFuture<ReadHandle> readOffloaded(long ledgerId, UUID uid, Map<String, String> driverMetadata) {
        return Tasks.run(cluster.readers(), () -> {
            NamedCopies.Copy copy = open(nameOf(uid, ledgerId, driverMetadata), driverMetadata);
            LedgerIndex index = LedgerIndex.decode(copy.index());
            DataObject data = dataObject(copy, index.dataLength(), ledgerId, BlockWriter.LEDGER_MAGIC, index.blocks());
            LedgerMetadata metadata = OffloadUtils.parseLedgerMetadata(ledgerId, index.metadata());
            return new OffloadedLedger(metadata, List.of(data), cluster.readers());
        });
    }

    @Override
    public CompletableFuture<ReadHandle> readOffloaded(
            long ledgerId, OffloadContext context, Map<String, String> driverMetadata) {
        if (context.getOffloadSegmentCount() == 0) {
            return readOffloaded(ledgerId, new UUID(context.getUidMsb(), context.getUidLsb()), driverMetadata);
        }
        return Tasks.run(cluster.readers(), () -> {
            List<DataObject> parts = new ArrayList<>();
            LedgerMetadata metadata = null;
            for (OffloadSegment segment : context.getOffloadSegmentList()) {
                UUID uid = new UUID(segment.getUidMsb(), segment.getUidLsb());
                NamedCopies.Copy copy = open(nameOf(uid, driverMetadata), driverMetadata);
                SegmentIndex index = SegmentIndex.decode(copy.index());
                SegmentIndex.Ledger ledger = index.ledgers().get(ledgerId);
                if (ledger != null && !ledger.blocks().isEmpty()) {
                    metadata = metadataOf(ledgerId, ledger);
                    parts.add(dataObject(
                            copy, index.dataLength(), ledgerId, BlockWriter.SEGMENT_MAGIC, ledger.blocks()));
                }
            }
            if (parts.isEmpty()) {
                throw new BKException.BKNoSuchLedgerExistsException();
            }
            return new OffloadedLedger(metadata, parts, cluster.readers());
        });
    }

    private NamedCopies.Copy open(String name, Map<String, String> driverMetadata) throws IOException, BKException {
        long begin = System.nanoTime();
        try {
            NamedCopies.Copy copy = copies.open(name);
            stats.recordReadOffloadIndexLatency(topicOf(driverMetadata), System.nanoTime() - begin, TimeUnit.NANOSECONDS);
            return copy;
        } catch (IOException | BKException | RuntimeException error) {
            stats.recordReadOffloadError(topicOf(driverMetadata));
            throw error;
        }
    }

    private DataObject dataObject(
            NamedCopies.Copy copy, long size, long ledgerId, int magic, NavigableMap<Long, BlockPlace> blocks) {
        Integer buffer = policies.getManagedLedgerOffloadReadBufferSizeInBytes();
        int bufferBytes = buffer == null ? DEFAULT_BUFFER_BYTES : buffer;
        return new DataObject(cluster.store(), copy.dataKey(), size, bufferBytes, ledgerId, magic, blocks);
    }

    private static LedgerMetadata metadataOf(long ledgerId, SegmentIndex.Ledger ledger) throws IOException {
        LedgerMetadataFormat format = LedgerMetadataFormat.newBuilder()
                .setQuorumSize(1)
                .setEnsembleSize(1)
                .setAckQuorumSize(1)
                .setLength(ledger.info().getSize())
                .setLastEntryId(ledger.info().getEntries() - 1)
                .setCtime(ledger.info().getTimestamp())
                .setState(LedgerMetadataFormat.State.CLOSED)
                // BookKeeper's classes accept no ledger without a bookie.
                .addSegment(LedgerMetadataFormat.Segment.newBuilder()
                        .setFirstEntryId(0)
                        .addEnsembleMember(DRIVER))
                .build();
        return OffloadUtils.parseLedgerMetadata(ledgerId, format.toByteArray());
    }

    @Override
    public CompletableFuture<Void> deleteOffloaded(long ledgerId, UUID uid, Map<String, String> driverMetadata) {
        return delete(nameOf(uid, ledgerId, driverMetadata), driverMetadata);
    }

    @Override
    public CompletableFuture<Void> deleteOffloaded(UUID uid, Map<String, String> driverMetadata) {
        return delete(nameOf(uid, driverMetadata), driverMetadata);
    }

    private CompletableFuture<Void> delete(String name, Map<String, String> driverMetadata) {
        return copies.delete(name)
                .whenComplete((none, error) -> stats.recordDeleteOffloadOps(topicOf(driverMetadata), error == null));
    }

    /** Passes the objects of all copies to a consumer, until it returns false. */
    @Override
    public void scanLedgers(OffloadedLedgerMetadataConsumer consumer, Map<String, String> driverMetadata)
            throws ManagedLedgerException {
        String prefix = driverMetadata.getOrDefault(PREFIX, settings.prefix());
        Pages<NamedObject> pages = copies.list(prefix);
        String token = "";
        do {
            Page<NamedObject> page;
            try {
                page = await(pages.page(token));
                for (NamedObject object : page.items()) {
                    if (!consumer.accept(describe(object, prefix))) {
                        return;
                    }
                }
            } catch (StreammetaException error) {
                throw new ManagedLedgerException(error);
            } catch (Exception error) {
                throw ManagedLedgerException.getManagedLedgerException(error);
            }
            token = page.nextToken();
        } while (!token.isEmpty());
    }

    private OffloadedLedgerMetadata describe(NamedObject object, String prefix) {
        String name = object.name().substring(prefix.length());
        Matcher ledger = LEDGER.matcher(name);
        return OffloadedLedgerMetadata.builder()
                .name(object.name())
                .bucketName(settings.bucket().replaceFirst("\\?.*", "")) // the rest may contain secrets
                .uuid(ledger.matches() ? ledger.group(1) : name.replaceFirst("-index$", ""))
                .ledgerId(ledger.matches() ? Long.parseLong(ledger.group(2)) : -1)
                .lastModified(object.committedAtMs())
                .size(object.size())
                .uri(copies.keyOf(object))
                .userMetadata(object.metadata())
                .build();
    }

    @Override
    public void close() {
        onClose.run();
    }

    private String nameOf(UUID uid, long ledgerId, Map<String, String> driverMetadata) {
        return nameOf(uid, driverMetadata) + "-ledger-" + ledgerId;
    }

    private String nameOf(UUID uid, Map<String, String> driverMetadata) {
        return driverMetadata.getOrDefault(PREFIX, settings.prefix()) + uid;
    }

    private Map<String, String> with(Map<String, String> extraMetadata) {
        Map<String, String> all = new HashMap<>(labels);
        all.putAll(extraMetadata);
        return all;
    }

    private static String topicOf(Map<String, String> driverMetadata) {
        return driverMetadata.getOrDefault(MANAGED_LEDGER, "");
    }
}
