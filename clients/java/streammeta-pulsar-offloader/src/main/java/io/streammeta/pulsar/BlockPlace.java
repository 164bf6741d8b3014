package io.streammeta.pulsar;

import java.nio.ByteBuffer;
import java.util.NavigableMap;
import java.util.TreeMap;

/**
 * Place of a block in a data object.
 *
 * @param firstEntry the id of the block's first entry
 * @param part the number of the block, from 1
 * @param offset the first byte of its header in the data object
 */
record BlockPlace(long firstEntry, int part, long offset) {
    static final int BYTES = Long.BYTES + Integer.BYTES + Long.BYTES;

    void encode(ByteBuffer out) {
        out.putLong(firstEntry).putInt(part).putLong(offset);
    }

    /** Returns so many places by their first entry. */
    static NavigableMap<Long, BlockPlace> decode(ByteBuffer in, int count) {
        NavigableMap<Long, BlockPlace> blocks = new TreeMap<>();
        for (int row = 0; row < count; row++) {
            BlockPlace block = new BlockPlace(in.getLong(), in.getInt(), in.getLong());
            blocks.put(block.firstEntry, block);
        }
        return blocks;
    }
}
