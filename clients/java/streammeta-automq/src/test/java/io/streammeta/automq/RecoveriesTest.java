package io.streammeta.automq;

import static io.streammeta.automq.Node.get;
import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.s3.failover.FailoverRequest;
import com.automq.stream.s3.failover.FailoverResponse;
import com.automq.stream.s3.metadata.StreamMetadata;
import com.automq.stream.s3.metadata.StreamState;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.Recovery;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreamToOpen;
import io.streammeta.client.StreammetaClient;
import io.streammeta.testkit.Controllers;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.atomic.AtomicReference;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class RecoveriesTest {
    private static final Duration TIMEOUT = Duration.ofSeconds(2);

    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    @Test
    void aDeadNodeIsRecoveredInItsNameAndItsStreamsAreClosed() throws Exception {
        AtomicReference<Node> self = new AtomicReference<>();
        CompletableFuture<FailoverRequest> recovered = new CompletableFuture<>();
        Recoveries recoveries = new Recoveries(request -> {
            CompletableFuture<FailoverResponse> done =
                    CompletableFuture.supplyAsync(() -> recover(self.get(), request));
            done.thenAccept(response -> recovered.complete(request));
            return done;
        });

        SessionOptions dying = SessionOptions.DEFAULT.withTimeout(TIMEOUT).withWalConfig("0@file:///wal");
        long streamId;
        try (StreammetaClient dead = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            var session = await(dead.openSession(Node.newProcess(41), dying));
            Thread.sleep(500); // one heartbeat begins the session
            streamId = await(session.streams().create(Map.of()));
            await(session.streams().open(new StreamToOpen(streamId, 1)));
        } // without an orderly close of the session

        SessionOptions alive = SessionOptions.DEFAULT.withTimeout(TIMEOUT).withListener(recoveries);
        try (Node node = Node.open(CONTROLLERS.endpoints(), Node.newProcess(42), alive)) {
            self.set(node);
            FailoverRequest request = get(recovered);
            assertEquals(41, request.getNodeId());
            assertEquals("0@file:///wal", request.getKraftWalConfigs());
            StreamMetadata stream = node.describe(streamId);
            assertEquals(StreamState.CLOSED, stream.state());
            assertEquals(10, stream.endOffset());
        }
    }

    /** Does with the managers what s3stream's Failover does. */
    private static FailoverResponse recover(Node node, FailoverRequest request) {
        NodeIdentity dead = new NodeIdentity(request.getNodeId(), request.getNodeEpoch());
        var streams = node.metadata().streamsOf(dead);
        var objects = node.metadata().objectsOf(dead);
        for (StreamMetadata stream : get(streams.getOpeningStreams())) {
            long objectId = get(objects.prepareObject(1, 60_000));
            get(objects.commitStreamSetObject(Node.upload(
                    objectId, stream.streamId(), stream.endOffset(), stream.endOffset() + 10)));
            get(streams.closeStream(stream.streamId(), stream.epoch()));
            assertEquals(1, get(objects.getServerObjects()).size());
        }
        return new FailoverResponse();
    }

    @Test
    void aNodeIsRecoveredOnceAtATimeAndAgainAfterAnError() {
        List<CompletableFuture<FailoverResponse>> started = new ArrayList<>();
        Recoveries recoveries = new Recoveries(request -> {
            started.add(new CompletableFuture<>());
            if (started.size() == 2) {
                throw new IllegalStateException("not ready");
            }
            return started.get(started.size() - 1);
        });
        List<Recovery> assigned = List.of(new Recovery(new NodeIdentity(1, 2), "wal"));
        recoveries.onAssigned(assigned, List.of());
        recoveries.onAssigned(assigned, List.of());
        assertEquals(1, started.size());

        started.get(0).completeExceptionally(new IllegalStateException("lost"));
        recoveries.onAssigned(assigned, List.of());
        recoveries.onAssigned(assigned, List.of());
        assertEquals(3, started.size());
        assertTrue(started.get(2).complete(new FailoverResponse()));
    }
}
