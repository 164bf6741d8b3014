package io.streammeta.pulsar;

import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;

import io.streammeta.testkit.Controllers;
import io.streammeta.testkit.Relay;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

/** Every step with connections that break under it, and a controller that is killed. */
class FaultsTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.behindRelays();

    private static final int ROUNDS = 12;

    @Test
    void everyStepSucceedsWhileConnectionsBreak() throws Exception {
        try (Ledgers ledgers = new Ledgers()) {
            StreammetaOffloader offloader = ledgers.offloader(CONTROLLERS.endpoints(), CONTROLLERS.bucket());
            Map<String, String> metadata = offloader.getOffloadDriverMetadata();
            List<UUID> uids = new ArrayList<>();
            List<ReadHandle> sources = new ArrayList<>();

            for (int round = 0; round < ROUNDS; round++) {
                ReadHandle source = ledgers.closed(20);
                UUID uid = UUID.randomUUID();
                unsettled(round, offloader.offload(source, uid, Map.of()));
                uids.add(uid);
                sources.add(source);
                if (round == ROUNDS / 2) {
                    CONTROLLERS.kill(1);
                }
            }
            for (int round = 0; round < ROUNDS; round++) {
                long ledgerId = sources.get(round).getId();
                var opening = offloader.readOffloaded(ledgerId, uids.get(round), metadata);
                unsettled(round, opening);
                assertArrayEquals(ledgers.written(ledgerId, 0, 19), Ledgers.read(opening.get(), 0, 19));
            }
            CONTROLLERS.start(1);
            for (int round = 0; round < ROUNDS; round++) {
                unsettled(round, offloader.deleteOffloaded(sources.get(round).getId(), uids.get(round), metadata));
            }

            List<String> left = new ArrayList<>();
            offloader.scanLedgers(object -> left.add(object.getName()), metadata);
            assertEquals(List.of(), left);
            offloader.close();
        }
    }

    /** Waits for a step, and resets all connections again and again until it ends, at times that differ by round. */
    private static void unsettled(int round, CompletableFuture<?> step) throws Exception {
        for (int cut = 0; cut < 5 && !step.isDone(); cut++) {
            Thread.sleep(1 + (round * 7 + cut * 13) % 40);
            CONTROLLERS.relays().forEach(Relay::resetAll);
        }
        step.get();
    }
}
