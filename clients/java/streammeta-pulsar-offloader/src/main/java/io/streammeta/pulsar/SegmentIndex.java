package io.streammeta.pulsar;

import com.google.protobuf.InvalidProtocolBufferException;
import java.io.IOException;
import java.nio.BufferUnderflowException;
import java.nio.ByteBuffer;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.NavigableMap;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.ManagedLedgerInfo.LedgerInfo;

/**
 * Index object of a segment of streaming offload, in the format of Pulsar's own offloaders.
 *
 * @param dataLength the size of the data object in bytes
 * @param ledgers the ledgers by id, in the order of their blocks
 */
record SegmentIndex(long dataLength, Map<Long, Ledger> ledgers) {
    private static final int MAGIC = 0x3D1FB0BC;
    private static final int LEDGER_HEAD_BYTES = Long.BYTES + 2 * Integer.BYTES;

    /**
     * Entries of one ledger in a segment.
     *
     * @param info the managed ledger's information on it. An open ledger has as many entries as were offloaded
     * @param blocks the blocks by their first entries
     */
    record Ledger(LedgerInfo info, NavigableMap<Long, BlockPlace> blocks) {}

    byte[] encode() {
        int size = LedgerIndex.headBytes();
        for (Ledger ledger : ledgers.values()) {
            size += LEDGER_HEAD_BYTES
                    + ledger.info().getSerializedSize()
                    + ledger.blocks().size() * BlockPlace.BYTES;
        }

        ByteBuffer out = ByteBuffer.allocate(size);
        LedgerIndex.putHead(out, MAGIC, dataLength);
        ledgers.forEach((ledgerId, ledger) -> {
            byte[] info = ledger.info().toByteArray();
            out.putLong(ledgerId).putInt(ledger.blocks().size()).putInt(info.length).put(info);
            ledger.blocks().values().forEach(block -> block.encode(out));
        });
        return out.array();
    }

    /**
     * Returns the index in these bytes.
     *
     * @throws IOException if they are no index, or cut
     */
    static SegmentIndex decode(byte[] data) throws IOException {
        try {
            ByteBuffer in = ByteBuffer.wrap(data);
            long dataLength = LedgerIndex.readHead(in, MAGIC);
            Map<Long, Ledger> ledgers = new LinkedHashMap<>();
            while (in.hasRemaining()) { // the format has no count of ledgers
                long ledgerId = in.getLong();
                int count = in.getInt();
                byte[] info = new byte[in.getInt()];
                in.get(info);
                ledgers.put(ledgerId, new Ledger(LedgerInfo.parseFrom(info), BlockPlace.decode(in, count)));
            }
            return new SegmentIndex(dataLength, ledgers);
        } catch (BufferUnderflowException | NegativeArraySizeException error) {
            throw LedgerIndex.cut(data, error);
        } catch (InvalidProtocolBufferException error) {
            throw new IOException("index object is damaged. Offload its ledgers again", error);
        }
    }
}
