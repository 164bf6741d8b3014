package io.streammeta.automq;

import static io.streammeta.automq.Node.get;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.api.AppendResult;
import com.automq.stream.api.FetchResult;
import com.automq.stream.api.RecordBatch;
import com.automq.stream.api.RecordBatchWithContext;
import com.automq.stream.api.Stream;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Random;
import java.util.concurrent.CompletableFuture;

/** Batches whose bytes are known from their stream and offset, so that each read is compared by content. */
final class Batches {
    static final int COUNT = 10;
    private static final int BYTES = 700;
    private static final int FETCH_BYTES = 1 << 16;

    private Batches() {}

    /** Appends batches from one offset to another. */
    static List<CompletableFuture<AppendResult>> append(Stream stream, long start, long end) {
        List<CompletableFuture<AppendResult>> appended = new ArrayList<>();
        for (long offset = start; offset < end; offset += COUNT) {
            appended.add(stream.append(of(bytes(stream.streamId(), offset))));
        }
        return appended;
    }

    static RecordBatch of(byte[] bytes) {
        return new Batch(COUNT, 0, Map.of(), ByteBuffer.wrap(bytes));
    }

    static void appendAll(Stream stream, long start, long end) {
        append(stream, start, end).forEach(Node::get);
        assertEquals(end, stream.nextOffset());
    }

    /** Reads all offsets, and asserts that each batch is there once, with its own bytes. */
    static void assertReadable(Stream stream, long start, long end) {
        long offset = start;
        while (offset < end) {
            FetchResult result = get(stream.fetch(offset, end, FETCH_BYTES));
            assertTrue(!result.recordBatchList().isEmpty(), "no batch at " + offset);
            for (RecordBatchWithContext batch : result.recordBatchList()) {
                assertEquals(offset, batch.baseOffset());
                byte[] bytes = new byte[batch.rawPayload().remaining()];
                batch.rawPayload().duplicate().get(bytes);
                assertArrayEquals(bytes(stream.streamId(), offset), bytes, "batch at " + offset);
                offset = batch.lastOffset();
            }
            result.free();
        }
    }

    private static byte[] bytes(long streamId, long offset) {
        byte[] bytes = new byte[BYTES];
        new Random(31 * streamId + offset).nextBytes(bytes);
        return bytes;
    }

    private record Batch(int count, long baseTimestamp, Map<String, String> properties, ByteBuffer rawPayload)
            implements RecordBatch {}
}
