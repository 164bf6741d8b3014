package io.streammeta.pulsar;

import io.netty.buffer.Unpooled;
import io.streammeta.store.ObjectNotFoundException;
import io.streammeta.store.ObjectStore;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.Map;
import java.util.NavigableMap;
import java.util.TreeMap;
import org.apache.bookkeeper.client.BKException;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.impl.LedgerEntryImpl;

/**
 * Reads entries of one ledger from a data object, in ranges of a buffer. It keeps one range and the places of some
 * entries, so that a read in the middle of a block begins near its entry. For one thread at a time.
 */
final class DataObject {
    /** Distance in bytes between the places that are kept. */
    private static final int SPACING = 64 << 10;

    private static final int MOST_PLACES = 4096;

    private final ObjectStore store;
    private final String key;
    private final long size;
    private final int bufferBytes;
    private final long ledgerId;
    private final int magic;
    private final NavigableMap<Long, BlockPlace> blocks;
    /** Places of the heads of entries, by entry. */
    private final NavigableMap<Long, Long> places = new TreeMap<>();

    private long spacing = SPACING;
    /** Place after the last read, where a sequential reader continues. */
    private long nextEntry = -1;

    private long nextAt;
    private byte[] buffer = {};
    private long bufferStart;

    /**
     * Reads nothing yet.
     *
     * @param magic the first bytes of each block
     * @param blocks the ledger's blocks by first entry
     */
    DataObject(
            ObjectStore store,
            String key,
            long size,
            int bufferBytes,
            long ledgerId,
            int magic,
            NavigableMap<Long, BlockPlace> blocks) {
        this.store = store;
        this.key = key;
        this.size = size;
        this.bufferBytes = bufferBytes;
        this.ledgerId = ledgerId;
        this.magic = magic;
        this.blocks = blocks;
    }

    /** Returns the first entry in the object. */
    long firstEntry() {
        return blocks.firstKey();
    }

    /**
     * Adds entries to a list, both ends included. If it fails, none is added.
     *
     * @throws BKException.BKNoSuchLedgerExistsException if the object was deleted
     * @throws IOException if an entry is not at its place
     */
    void read(long first, long last, List<LedgerEntry> entries) throws IOException, BKException {
        int before = entries.size();
        boolean isRead = false;
        try {
            readFrom(first, last, entries);
            isRead = true;
        } catch (ObjectNotFoundException deletedMeanwhile) {
            throw new BKException.BKNoSuchLedgerExistsException();
        } finally {
            if (!isRead) {
                List<LedgerEntry> partial = entries.subList(before, entries.size());
                partial.forEach(LedgerEntry::close);
                partial.clear();
            }
        }
    }

    private void readFrom(long first, long last, List<LedgerEntry> entries) throws IOException {
        long entry = blocks.floorKey(first);
        long at = 0;
        Map.Entry<Long, Long> known = places.floorEntry(first);
        if (known != null && known.getKey() > entry) {
            entry = known.getKey();
            at = known.getValue();
        }
        if (nextEntry > entry && nextEntry <= first) {
            entry = nextEntry;
            at = nextAt;
        }

        for (; entry <= last; entry++) {
            if (blocks.containsKey(entry)) { // the rest of the block before is padding
                at = enter(blocks.get(entry));
            }
            ByteBuffer head = bytes(at, BlockWriter.ENTRY_HEADER_BYTES);
            int length = head.getInt();
            long found = head.getLong();
            if (found != entry || length < 0) {
                throw damaged("entry " + entry, at);
            }
            note(entry, at);
            at += BlockWriter.ENTRY_HEADER_BYTES;
            if (entry >= first) {
                byte[] data = new byte[length];
                bytes(at, length).get(data);
                entries.add(LedgerEntryImpl.create(ledgerId, entry, length, Unpooled.wrappedBuffer(data)));
            }
            at += length;
        }
        nextEntry = entry;
        nextAt = at;
    }

    private long enter(BlockPlace block) throws IOException {
        ByteBuffer header = bytes(block.offset(), BlockWriter.HEADER_BYTES);
        boolean isBlock = header.getInt(0) == magic && header.getLong(20) == block.firstEntry();
        if (!isBlock || (magic == BlockWriter.SEGMENT_MAGIC && header.getLong(28) != ledgerId)) {
            throw damaged("the block of entry " + block.firstEntry(), block.offset());
        }
        return block.offset() + BlockWriter.HEADER_BYTES;
    }

    private void note(long entry, long at) {
        Map.Entry<Long, Long> before = places.floorEntry(entry);
        if (before != null && at - before.getValue() < spacing) {
            return;
        }
        places.put(entry, at);
        if (places.size() > MOST_PLACES) {
            // Memory stays bounded, and the places stay evenly spread.
            spacing *= 2;
            long[] last = {-spacing};
            places.values().removeIf(place -> {
                boolean isClose = place - last[0] < spacing;
                last[0] = isClose ? last[0] : place;
                return isClose;
            });
        }
    }

    private ByteBuffer bytes(long start, int length) throws IOException {
        if (start + length > size) {
            throw damaged("a block's end", start);
        }
        if (start < bufferStart || start + length > bufferStart + buffer.length) {
            long end = Math.min(size, start + Math.max(length, bufferBytes));
            buffer = store.getRange(key, start, end);
            bufferStart = start;
        }
        if (start + length > bufferStart + buffer.length) {
            throw damaged("a block's end", bufferStart + buffer.length);
        }
        return ByteBuffer.wrap(buffer, (int) (start - bufferStart), length).slice();
    }

    private IOException damaged(String expected, long at) {
        return new IOException("object " + key + " of ledger " + ledgerId + " is damaged: expected " + expected
                + " at byte " + at + ". Restore the object");
    }
}
