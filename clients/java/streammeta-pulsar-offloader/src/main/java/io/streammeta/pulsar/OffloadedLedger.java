package io.streammeta.pulsar;

import java.io.IOException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Executor;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.api.LastConfirmedAndEntry;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.impl.LedgerEntriesImpl;
import org.apache.bookkeeper.mledger.ManagedLedgerException;
import org.apache.bookkeeper.mledger.OffloadedLedgerHandle;

/**
 * Handle of a ledger in one or more data objects. Its reads take turns, and need memory for their entries and one range
 * of each object.
 */
@SuppressWarnings("try") // BookKeeper's close may be interrupted
final class OffloadedLedger implements ReadHandle, OffloadedLedgerHandle {
    private final LedgerMetadata metadata;
    private final List<DataObject> parts;
    private final Executor readers;
    private final AtomicInteger pendingReads = new AtomicInteger();
    private volatile long lastAccess = System.currentTimeMillis();
    private volatile boolean isClosed;

    /**
     * Opens a handle.
     *
     * @param parts the data objects in the order of their entries. Where they overlap, the later one counts
     */
    OffloadedLedger(LedgerMetadata metadata, List<DataObject> parts, Executor readers) {
        this.metadata = metadata;
        this.parts = parts;
        this.readers = readers;
    }

    @Override
    public CompletableFuture<LedgerEntries> readAsync(long firstEntry, long lastEntry) {
        pendingReads.incrementAndGet();
        lastAccess = System.currentTimeMillis();
        return Tasks.run(readers, () -> readNow(firstEntry, lastEntry)).whenComplete((entries, error) -> {
            lastAccess = System.currentTimeMillis();
            pendingReads.decrementAndGet();
        });
    }

    private synchronized LedgerEntries readNow(long first, long last) throws Exception {
        if (isClosed) {
            throw new ManagedLedgerException.OffloadReadHandleClosedException();
        }
        if (first > last || first < firstEntry() || last > getLastAddConfirmed()) {
            throw new BKException.BKIncorrectParameterException();
        }

        List<LedgerEntry> entries = new ArrayList<>();
        try {
            for (Slice slice : slices(first, last)) {
                slice.part.read(slice.first, slice.last, entries);
            }
        } catch (IOException | BKException | RuntimeException error) {
            entries.forEach(LedgerEntry::close);
            throw error;
        }
        return LedgerEntriesImpl.create(entries);
    }

    private long firstEntry() {
        return parts.stream().mapToLong(DataObject::firstEntry).min().orElseThrow();
    }

    private record Slice(DataObject part, long first, long last) {}

    private Deque<Slice> slices(long first, long last) {
        Deque<Slice> slices = new ArrayDeque<>();
        long end = last;
        for (int index = parts.size() - 1; index >= 0 && end >= first; index--) {
            long begin = Math.max(first, parts.get(index).firstEntry());
            if (begin <= end) {
                slices.addFirst(new Slice(parts.get(index), begin, end));
                end = begin - 1;
            }
        }
        return slices;
    }

    @Override
    public CompletableFuture<LedgerEntries> readUnconfirmedAsync(long firstEntry, long lastEntry) {
        return readAsync(firstEntry, lastEntry);
    }

    @Override
    public CompletableFuture<Long> readLastAddConfirmedAsync() {
        return CompletableFuture.completedFuture(getLastAddConfirmed());
    }

    @Override
    public CompletableFuture<Long> tryReadLastAddConfirmedAsync() {
        return CompletableFuture.completedFuture(getLastAddConfirmed());
    }

    @Override
    public long getLastAddConfirmed() {
        return metadata.getLastEntryId();
    }

    @Override
    public long getLength() {
        return metadata.getLength();
    }

    @Override
    public boolean isClosed() { // the ledger, not this handle
        return metadata.isClosed();
    }

    @Override
    public CompletableFuture<LastConfirmedAndEntry> readLastAddConfirmedAndEntryAsync(
            long entryId, long timeOutInMillis, boolean parallel) {
        return CompletableFuture.failedFuture(
                new UnsupportedOperationException("a copied ledger gets no more entries. Use readAsync"));
    }

    @Override
    public long getId() {
        return metadata.getLedgerId();
    }

    @Override
    public LedgerMetadata getLedgerMetadata() {
        return metadata;
    }

    @Override
    public CompletableFuture<Void> closeAsync() {
        isClosed = true;
        return CompletableFuture.completedFuture(null);
    }

    @Override
    public long lastAccessTimestamp() {
        return lastAccess;
    }

    /** Returns the number of reads in progress. Pulsar asks for it since 4.0.8. */
    public int getPendingRead() {
        return pendingReads.get();
    }
}
