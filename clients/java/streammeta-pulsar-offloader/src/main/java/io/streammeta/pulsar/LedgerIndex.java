package io.streammeta.pulsar;

import java.io.IOException;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.NavigableMap;
import java.util.TreeMap;

/**
 * Index object of a copied ledger, in the format of Pulsar's own offloaders.
 *
 * @param metadata BookKeeper's metadata of the ledger, encoded
 * @param dataLength the size of the data object in bytes
 * @param blocks the blocks by their first entries
 */
record LedgerIndex(byte[] metadata, long dataLength, NavigableMap<Long, BlockPlace> blocks) {
    private static final int MAGIC = 0xDE47DE47;
    private static final int HEAD_BYTES = 2 * Integer.BYTES + 2 * Long.BYTES;

    static LedgerIndex of(byte[] metadata, long dataLength, List<BlockPlace> blocks) {
        NavigableMap<Long, BlockPlace> byFirst = new TreeMap<>();
        blocks.forEach(block -> byFirst.put(block.firstEntry(), block));
        return new LedgerIndex(metadata, dataLength, byFirst);
    }

    byte[] encode() {
        int size = HEAD_BYTES + 2 * Integer.BYTES + metadata.length + blocks.size() * BlockPlace.BYTES;
        ByteBuffer out = ByteBuffer.allocate(size);
        putHead(out, MAGIC, dataLength);
        out.putInt(blocks.size()).putInt(metadata.length).put(metadata);
        blocks.values().forEach(block -> block.encode(out));
        return out.array();
    }

    /**
     * Returns the index in these bytes.
     *
     * @throws IOException if they are no index, or cut
     */
    static LedgerIndex decode(byte[] data) throws IOException {
        try {
            ByteBuffer in = ByteBuffer.wrap(data);
            long dataLength = readHead(in, MAGIC);
            int count = in.getInt();
            byte[] metadata = new byte[in.getInt()];
            in.get(metadata);
            return new LedgerIndex(metadata, dataLength, BlockPlace.decode(in, count));
        } catch (BufferUnderflowException | NegativeArraySizeException error) {
            throw cut(data, error);
        }
    }

    static int headBytes() {
        return HEAD_BYTES;
    }

    /** Writes the head of an index object, whose size is the buffer's. */
    static void putHead(ByteBuffer out, int magic, long dataLength) {
        out.putInt(magic).putInt(out.capacity()).putLong(dataLength).putLong(BlockWriter.HEADER_BYTES);
    }

    /** Reads the head of an index object, and returns the size of its data object. */
    static long readHead(ByteBuffer in, int magic) throws IOException {
        int found = in.getInt();
        if (found != magic) {
            throw new IOException(
                    String.format("index object begins with %08x, expected %08x. Offload the ledger again", found, magic));
        }
        in.getInt();
        long dataLength = in.getLong();
        in.getLong();
        return dataLength;
    }

    static IOException cut(byte[] data, RuntimeException cause) {
        return new IOException("index object of " + data.length + " bytes is cut. Offload the ledger again", cause);
    }
}
