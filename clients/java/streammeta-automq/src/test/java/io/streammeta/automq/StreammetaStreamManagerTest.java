package io.streammeta.automq;

import static io.streammeta.automq.Node.get;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.api.exceptions.ErrorCode;
import com.automq.stream.api.exceptions.StreamClientException;
import com.automq.stream.s3.metadata.StreamMetadata;
import com.automq.stream.s3.metadata.StreamState;
import io.streammeta.client.errors.ClientClosedException;
import io.streammeta.client.errors.NodeEpochExpiredException;
import io.streammeta.client.errors.StreamFencedException;
import io.streammeta.client.errors.StreamNotFoundException;
import io.streammeta.testkit.Controllers;
import java.util.List;
import java.util.Map;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class StreammetaStreamManagerTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private Node first;
    private Node second;

    @BeforeEach
    void open() {
        first = Node.open(CONTROLLERS.endpoints(), 11);
        second = Node.open(CONTROLLERS.endpoints(), 12);
    }

    @AfterEach
    void close() {
        first.close();
        second.close();
    }

    @Test
    void aStreamIsCreatedOpenedClosedAndDeleted() {
        long streamId = get(first.streams().createStream(Map.of("topic", "a")));
        StreamMetadata created = first.describe(streamId);
        assertEquals(-1, created.epoch());
        assertEquals(StreamState.CLOSED, created.state());
        assertEquals(-1, created.nodeId());

        StreamMetadata opened = get(first.streams().openStream(streamId, 1, Map.of()));
        assertEquals(StreamState.OPENED, opened.state());
        assertEquals(0, opened.startOffset());
        assertEquals(0, opened.endOffset());
        assertEquals(11, first.describe(streamId).nodeId());

        get(first.streams().closeStream(streamId, 1));
        assertEquals(StreamState.CLOSED, first.describe(streamId).state());
        get(first.streams().deleteStream(streamId, 1));
        assertTrue(get(first.streams().getStreams(List.of(streamId))).isEmpty());
    }

    @Test
    void noIdsAreNoStreams() {
        first.openedStream();
        assertTrue(get(first.streams().getStreams(List.of())).isEmpty());
    }

    @Test
    void aStreamThatWasNeverOpenedIsDeleted() {
        long streamId = get(first.streams().createStream(Map.of()));
        get(first.streams().deleteStream(streamId, -1));
        assertTrue(get(first.streams().getStreams(List.of(streamId))).isEmpty());
    }

    @Test
    void anOpenWaitsUntilTheFormerOwnerHasClosed() throws Exception {
        long streamId = first.openedStream();
        CompletableFuture<StreamMetadata> opened = second.streams().openStream(streamId, 2, Map.of());
        Thread.sleep(300);
        assertFalse(opened.isDone());

        get(first.streams().closeStream(streamId, 1));
        assertEquals(2, get(opened).epoch());
        assertEquals(12, second.describe(streamId).nodeId());
    }

    @Test
    void theErrorsOfAFencedOwnerAreKnownToS3stream() {
        long streamId = first.openedStream();
        get(first.streams().closeStream(streamId, 1));
        get(second.streams().openStream(streamId, 2, Map.of()));

        StreamClientException closing =
                assertThrows(StreamClientException.class, () -> get(first.streams().closeStream(streamId, 1)));
        assertEquals(ErrorCode.EXPIRED_STREAM_EPOCH, closing.getCode());
        assertThrows(StreamFencedException.class, () -> get(first.streams().trimStream(streamId, 1, 1)));
        assertThrows(StreamFencedException.class, () -> get(first.streams().openStream(streamId, 1, Map.of())));
        assertThrows(StreamNotFoundException.class, () -> get(first.streams().openStream(987_654, 1, Map.of())));
    }

    @Test
    void aTrimReachesBeyondTheCommittedEnd() {
        long streamId = first.openedStream();
        first.commit(streamId, 0, 10);
        get(first.streams().trimStream(streamId, 1, 4));
        assertEquals(4, first.describe(streamId).startOffset());

        get(first.streams().trimStream(streamId, 1, 15));
        assertEquals(15, first.describe(streamId).startOffset());
        first.commit(streamId, 10, 20);
        assertEquals(15, first.describe(streamId).startOffset());
        assertEquals(20, first.describe(streamId).endOffset());
    }

    @Test
    void aFastCloseHandsOverAtTheAcknowledgedEnd() {
        assertTrue(first.streams().isFastCloseSupported());
        long streamId = first.openedStream();
        first.commit(streamId, 0, 10);
        get(first.streams().closeStream(streamId, 1, 25));

        assertEquals(25, get(second.streams().openStream(streamId, 2, Map.of())).endOffset());
        List<StreamMetadata> pending = get(first.streams().getOpeningStreams()).stream()
                .filter(stream -> stream.streamId() == streamId)
                .toList();
        assertEquals(10, pending.get(0).endOffset());
        assertEquals(1, pending.get(0).epoch());

        first.commit(streamId, 10, 25);
        assertTrue(get(first.streams().getOpeningStreams()).stream()
                .noneMatch(stream -> stream.streamId() == streamId));
    }

    @Test
    void aListenerHearsOfItsStream() throws Exception {
        long streamId = first.openedStream();
        long other = first.openedStream();
        BlockingQueue<StreamMetadata> heard = new LinkedBlockingQueue<>();
        var handle = second.streams().addMetadataListener(streamId, heard::add);
        assertEquals(0, heard.poll(10, TimeUnit.SECONDS).endOffset());

        first.commit(streamId, 0, 10);
        StreamMetadata changed = heard.poll(10, TimeUnit.SECONDS);
        while (changed.endOffset() != 10) {
            changed = heard.poll(10, TimeUnit.SECONDS);
        }
        assertEquals(streamId, changed.streamId());

        handle.close();
        first.commit(streamId, 10, 20);
        first.commit(other, 0, 10);
        Thread.sleep(300);
        assertTrue(heard.stream().allMatch(stream -> stream.streamId() == streamId && stream.endOffset() == 10));
    }

    @Test
    void aNewerProcessOfTheNodeFencesThisOne() {
        long streamId = first.openedStream();
        try (Node restarted = Node.open(CONTROLLERS.endpoints(), 11)) {
            assertThrows(NodeEpochExpiredException.class, () -> get(first.streams().createStream(Map.of())));
            assertThrows(NodeEpochExpiredException.class, () -> first.commit(streamId, 0, 10));
            assertEquals(1, restarted.describe(streamId).epoch());
        }
    }

    @Test
    void aClosedNodeMakesNoCall() {
        first.close();
        assertThrows(ClientClosedException.class, () -> get(first.streams().createStream(Map.of())));
    }
}
