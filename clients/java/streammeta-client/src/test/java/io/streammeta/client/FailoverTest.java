package io.streammeta.client;

import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.errors.StreammetaException;
import io.streammeta.testkit.Controllers;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.RegisterExtension;

/** Calls, commits and watches while leaders die and connections break. */
@Timeout(120)
class FailoverTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.behindRelays();

    private static StreammetaClient client;

    @BeforeAll
    static void connect() {
        client = StreammetaClient.builder()
                .endpoints(CONTROLLERS.endpoints())
                .deadline(Duration.ofSeconds(60))
                .build();
    }

    @AfterAll
    static void close() {
        client.close();
    }

    @Test
    void commitsAndChangesOutliveTheirLeader() throws InterruptedException {
        NodeIdentity node = new NodeIdentity(7, System.currentTimeMillis());
        try (BrokerSession session = await(client.openSession(node, SessionOptions.DEFAULT))) {
            long streamId = await(session.streams().create(Map.of()));
            await(session.streams().open(new StreamToOpen(streamId, 1)));
            Changes changes = new Changes();
            Watch watch = await(client.watch(WatchSelection.of(EntityKind.OBJECT, EntityKind.KEY), changes));

            long end = 0;
            long puts = 0;
            KeyValues keys = client.keyValues("failover");
            for (Fault fault : Fault.values()) {
                List<CompletableFuture<CommitVerdict>> verdicts = new ArrayList<>();
                PreparedObjects prepared = await(session.objects().prepare(200, Duration.ofMinutes(5)));
                int leader = await(client.describeCluster()).leaderId().orElseThrow();
                for (long objectId : prepared.ids()) {
                    Commit commit = Commit.of(objectId, ObjectFacts.ofSize(10))
                            .range(new StreamSlice(streamId, 1, end, end + 1))
                            .build();
                    verdicts.add(session.pipeline().submit(commit));
                    end++;
                    if (objectId == prepared.firstObjectId() + 50) {
                        fault.begin(leader);
                        await(keys.put("during", new byte[] {(byte) puts++}));
                    }
                }
                verdicts.forEach(verdict -> await(verdict).requireCommitted("a commit during " + fault));
                fault.end(leader);
            }

            assertEquals(end, await(client.streams().describe(streamId)).orElseThrow().endOffset());
            assertEquals(end, changes.await(MetadataChange.Object.class, (int) end));
            // A put without a condition may be stored by each of its attempts.
            assertTrue(changes.await(MetadataChange.Key.class, (int) puts) >= puts);
            watch.close();
        }
        assertTrue(client.metrics().leaderChanges() > 0);
    }

    private enum Fault {
        KILLED_LEADER {
            @Override
            void begin(int leader) {
                CONTROLLERS.kill(leader);
            }

            @Override
            void end(int leader) {
                CONTROLLERS.start(leader);
            }
        },
        PAUSED_LEADER {
            @Override
            void begin(int leader) {
                CONTROLLERS.pause(leader);
            }

            @Override
            void end(int leader) {
                CONTROLLERS.resume(leader);
            }
        },
        RESET_CONNECTIONS {
            @Override
            void begin(int leader) {
                CONTROLLERS.relays().forEach(relay -> relay.resetAll());
            }

            @Override
            void end(int leader) {}
        },
        SILENT_LEADER {
            @Override
            void begin(int leader) {
                CONTROLLERS.relays().get(leader - 1).hold();
                later(() -> CONTROLLERS.relays().get(leader - 1).heal());
            }

            @Override
            void end(int leader) {}
        };

        abstract void begin(int leader);

        abstract void end(int leader);

        private static void later(Runnable task) {
            CompletableFuture.delayedExecutor(3, TimeUnit.SECONDS).execute(task);
        }
    }

    /** The changes of a watch, each of which must come once. */
    private static final class Changes implements WatchListener {
        private final LinkedBlockingQueue<MetadataChange> received = new LinkedBlockingQueue<>();
        private final List<MetadataChange> seen = new ArrayList<>();

        @Override
        public void onChanges(List<MetadataChange> changes) {
            received.addAll(changes);
        }

        @Override
        public void onEnd(StreammetaException error) {
            throw error;
        }

        /** Waits for a number of commits or keys, and returns how many came. */
        long await(Class<? extends MetadataChange> kind, int count) throws InterruptedException {
            while (count(kind) < count) {
                MetadataChange change = received.poll(20, TimeUnit.SECONDS);
                if (change == null) {
                    break;
                }
                seen.add(change);
            }
            received.drainTo(seen);
            return count(kind);
        }

        private long count(Class<? extends MetadataChange> kind) {
            return seen.stream()
                    .filter(kind::isInstance)
                    .filter(change -> !(change instanceof MetadataChange.Object object)
                            || object.event() == MetadataChange.Event.COMMITTED)
                    .count();
        }
    }
}
