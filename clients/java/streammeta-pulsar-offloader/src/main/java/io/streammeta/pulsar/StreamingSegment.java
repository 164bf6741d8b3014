package io.streammeta.pulsar;

import static io.streammeta.client.StreammetaClient.await;

import io.netty.buffer.ByteBuf;
import io.netty.buffer.Unpooled;
import java.io.IOException;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Deque;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.NavigableMap;
import java.util.OptionalLong;
import java.util.TreeMap;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.Future;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.common.util.OrderedScheduler;
import org.apache.bookkeeper.mledger.Entry;
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadHandle;
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadResult;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.bookkeeper.mledger.Position;
import org.apache.bookkeeper.mledger.PositionFactory;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.ManagedLedgerInfo.LedgerInfo;

/**
 * Segment of streaming offload: accepts consecutive entries, writes them in blocks, and commits its two objects when it
 * is closed. It closes itself when it is full or old. Entries that wait in memory are bounded.
 */
final class StreamingSegment implements OffloadHandle {
    static final long SEGMENT_BYTES = 1 << 30;
    static final int BUFFER_BYTES = 10 << 20;
    static final int BLOCK_BYTES = 5 << 20;
    private static final long OPEN_SECONDS = 600;
    /** Pulsar's own reader needs padding before the first block when it begins with a later entry. */
    private static final long LAST_ENTRY_WITHOUT_PADDING = 127;

    /** Uploads and commits both objects. */
    interface Commit {
        void run(ScratchFile data, byte[] index) throws IOException;
    }

    private record Waiting(long ledgerId, long entryId, ByteBuf data) {}

    private final ManagedLedger managedLedger;
    private final long beginLedger;
    private final long beginEntry;
    private final ScratchFile file;
    private final BlockWriter blocks;
    private final Commit commit;
    private final OrderedScheduler scheduler;
    private final Future<?> timeout;
    private final CompletableFuture<OffloadResult> result = new CompletableFuture<>();

    /** Guarded by this. */
    private final Deque<Waiting> waiting = new ArrayDeque<>();

    private long waitingBytes;
    private long bytes;
    private long lastLedger;
    private long lastEntry;
    private boolean isClosed;

    /** Of the scheduler's thread alone. */
    private final Map<Long, NavigableMap<Long, BlockPlace>> places = new LinkedHashMap<>();

    private final Map<Long, Long> ends = new HashMap<>();

    StreamingSegment(
            ManagedLedger managedLedger,
            long beginLedger,
            long beginEntry,
            ScratchFile file,
            Commit commit,
            OrderedScheduler scheduler) {
        this.managedLedger = managedLedger;
        this.beginLedger = beginLedger;
        this.beginEntry = beginEntry;
        this.lastLedger = beginLedger;
        this.lastEntry = beginEntry - 1;
        this.file = file;
        this.blocks = new BlockWriter(file);
        this.commit = commit;
        this.scheduler = scheduler;
        this.timeout = scheduler.schedule(this::close, OPEN_SECONDS, TimeUnit.SECONDS);
    }

    @Override
    public synchronized Position lastOffered() {
        return PositionFactory.create(lastLedger, lastEntry);
    }

    @Override
    public CompletableFuture<Position> lastOfferedAsync() {
        return CompletableFuture.completedFuture(lastOffered());
    }

    /** Accepts an entry, and copies its data: the caller keeps the entry. */
    @Override
    public synchronized OfferEntryResult offerEntry(Entry entry) {
        if (isClosed) {
            return OfferEntryResult.FAIL_SEGMENT_CLOSED;
        }
        boolean isNext = entry.getLedgerId() == lastLedger && entry.getEntryId() == lastEntry + 1;
        boolean beginsLater = bytes > 0 && entry.getLedgerId() > lastLedger && entry.getEntryId() == 0;
        if (!isNext && !beginsLater) {
            return OfferEntryResult.FAIL_NOT_CONSECUTIVE;
        }
        if (waitingBytes >= BUFFER_BYTES) {
            return OfferEntryResult.FAIL_BUFFER_FULL;
        }

        byte[] data = entry.getData();
        waiting.add(new Waiting(entry.getLedgerId(), entry.getEntryId(), Unpooled.wrappedBuffer(data)));
        lastLedger = entry.getLedgerId();
        lastEntry = entry.getEntryId();
        waitingBytes += data.length;
        bytes += data.length;
        if (bytes >= SEGMENT_BYTES) {
            close();
        } else if (waitingBytes >= BLOCK_BYTES) {
            inOrder(() -> writeBlocks(BLOCK_BYTES));
        }
        return OfferEntryResult.SUCCESS;
    }

    @Override
    public CompletableFuture<OfferEntryResult> offerEntryAsync(Entry entry) {
        return CompletableFuture.completedFuture(offerEntry(entry));
    }

    /** Returns the entries of the segment once it is committed, or the error after which it does not exist. */
    @Override
    public CompletableFuture<OffloadResult> getOffloadResultAsync() {
        return result;
    }

    /** Closes the segment for entries, and has it committed. Returns whether it was open. */
    @Override
    public synchronized boolean close() {
        if (isClosed) {
            return false;
        }
        isClosed = true;
        timeout.cancel(false);
        inOrder(this::finish);
        return true;
    }

    private interface Step {
        void run() throws IOException;
    }

    private void inOrder(Step step) {
        Tasks.run(scheduler.chooseThread(beginLedger), () -> {
                    if (!result.isDone()) {
                        step.run();
                    }
                    return null;
                })
                .whenComplete((none, error) -> {
                    if (error != null) {
                        abandon(error);
                    }
                });
    }

    private synchronized void abandon(Throwable error) {
        isClosed = true;
        timeout.cancel(false);
        waiting.clear();
        result.completeExceptionally(error);
        try {
            file.close();
        } catch (IOException second) {
            error.addSuppressed(second);
        }
    }

    /** Writes blocks while this many bytes wait. */
    private void writeBlocks(long least) throws IOException {
        for (List<Waiting> block = nextBlock(least); !block.isEmpty(); block = nextBlock(least)) {
            Waiting first = block.get(0);
            if (blocks.blocks().isEmpty() && first.entryId > LAST_ENTRY_WITHOUT_PADDING) {
                file.write(BlockWriter.PADDING);
            }
            long size = block.stream().mapToLong(entry -> entry.data.readableBytes()).sum();
            // Four bytes of padding at least, which end the block for a reader.
            long length = BlockWriter.HEADER_BYTES
                    + (long) BlockWriter.ENTRY_HEADER_BYTES * block.size()
                    + size
                    + BlockWriter.PADDING.length;
            blocks.begin(Math.max(BLOCK_BYTES, length), first.entryId, OptionalLong.of(first.ledgerId));
            for (Waiting entry : block) {
                blocks.add(entry.entryId, entry.data);
            }
            blocks.end();

            BlockPlace place = blocks.blocks().get(blocks.blocks().size() - 1);
            places.computeIfAbsent(first.ledgerId, id -> new TreeMap<>()).put(first.entryId, place);
            ends.put(first.ledgerId, block.get(block.size() - 1).entryId);
            synchronized (this) {
                waitingBytes -= size;
            }
        }
    }

    /** Takes the entries of the next block, all of one ledger. */
    private synchronized List<Waiting> nextBlock(long least) {
        List<Waiting> block = new ArrayList<>();
        if (waitingBytes < least) {
            return block;
        }
        long size = 0;
        while (size < BLOCK_BYTES
                && !waiting.isEmpty()
                && (block.isEmpty() || waiting.peek().ledgerId == block.get(0).ledgerId)) {
            block.add(waiting.poll());
            size += block.get(block.size() - 1).data.readableBytes();
        }
        return block;
    }

    private void finish() throws IOException {
        writeBlocks(0);
        if (ends.isEmpty()) {
            throw new IOException("segment of ledger " + beginLedger + " is closed without an entry. Begin another one");
        }
        Map<Long, SegmentIndex.Ledger> ledgers = new LinkedHashMap<>();
        places.forEach((ledgerId, blocksOf) -> ledgers.put(ledgerId, new SegmentIndex.Ledger(infoOf(ledgerId), blocksOf)));
        commit.run(file, new SegmentIndex(file.size(), ledgers).encode());
        file.close();
        Position last = lastOffered();
        result.complete(new OffloadResult(beginLedger, beginEntry, last.getLedgerId(), last.getEntryId()));
    }

    private LedgerInfo infoOf(long ledgerId) {
        LedgerInfo known = await(managedLedger.getLedgerInfo(ledgerId));
        LedgerInfo info = known == null ? LedgerInfo.newBuilder().setLedgerId(ledgerId).build() : known;
        // Of an open ledger only the offloaded entries are known.
        return info.getEntries() > 0
                ? info
                : info.toBuilder().setEntries(ends.get(ledgerId) + 1).build();
    }
}
