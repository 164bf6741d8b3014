package io.streammeta.pulsar;

import io.netty.buffer.ByteBuf;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.OptionalLong;

/**
 * Writes blocks of whole entries, in the format of Pulsar's own offloaders: a header of 128 bytes, entries, and padding
 * up to the length that the header announces.
 */
final class BlockWriter {
    static final int HEADER_BYTES = 128;
    static final int ENTRY_HEADER_BYTES = Integer.BYTES + Long.BYTES;
    static final int LEDGER_MAGIC = 0xFBDBABCB;
    static final int SEGMENT_MAGIC = 0x26A66D32;
    /** Reads as the negative length of an entry, which sends a reader to the next block. */
    static final byte[] PADDING = {(byte) 0xFE, (byte) 0xDC, (byte) 0xDE, (byte) 0xAD};

    private final ScratchFile out;
    private final List<BlockPlace> blocks = new ArrayList<>();
    private long blockEnd;

    BlockWriter(ScratchFile out) {
        this.out = out;
    }

    /** Begins a block of a length. Blocks of segments have the id of their ledger. */
    void begin(long length, long firstEntry, OptionalLong ledgerId) throws IOException {
        blocks.add(new BlockPlace(firstEntry, blocks.size() + 1, out.size()));
        blockEnd = out.size() + length;
        ByteBuffer header = ByteBuffer.allocate(HEADER_BYTES)
                .putInt(ledgerId.isPresent() ? SEGMENT_MAGIC : LEDGER_MAGIC)
                .putLong(HEADER_BYTES)
                .putLong(length)
                .putLong(firstEntry)
                .putLong(ledgerId.orElse(0));
        out.write(header.array());
    }

    /** Whether an entry of this length fits into the block. */
    boolean hasRoom(int length) {
        return out.size() + ENTRY_HEADER_BYTES + length <= blockEnd;
    }

    void add(long entryId, ByteBuf data) throws IOException {
        int length = data.readableBytes();
        out.write(ByteBuffer.allocate(ENTRY_HEADER_BYTES)
                .putInt(length)
                .putLong(entryId)
                .array());
        data.getBytes(data.readerIndex(), out, length);
    }

    /** Fills the block up to its length. */
    void end() throws IOException {
        for (int at = 0; out.size() < blockEnd; at++) {
            out.write(PADDING[at % PADDING.length]);
        }
    }

    /** Returns the blocks that were begun, in their order. */
    List<BlockPlace> blocks() {
        return blocks;
    }
}
