package io.streammeta.client.transport;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.transport.LeaderRouter.Step;
import java.time.Duration;
import java.util.List;
import java.util.Optional;
import java.util.Random;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicLong;
import org.junit.jupiter.api.Test;

class LeaderRouterTest {
    private static final List<String> ENDPOINTS = List.of("a:1", "b:1", "c:1");

    private final AtomicLong clock = new AtomicLong();
    private final AtomicInteger leaderChanges = new AtomicInteger();
    private final LeaderRouter router =
            new LeaderRouter(ENDPOINTS, new Random(1), clock::get, leaderChanges::incrementAndGet);

    @Test
    void aHintIsFollowedAtOnce() {
        Step step = router.recordFailure("a:1", FailureKind.NOT_LEADER, 1, hint("b:1", 1));
        assertEquals(new Step("b:1", Duration.ZERO), step);
        assertEquals("b:1", router.first());
    }

    @Test
    void aHintToADeadLeaderIsIgnoredUntilTheEpochGrows() {
        router.recordFailure("a:1", FailureKind.NOT_LEADER, 1, hint("b:1", 1));
        router.recordFailure("b:1", FailureKind.UNREACHABLE, 2, Optional.empty());
        Step ignored = router.recordFailure("a:1", FailureKind.NOT_LEADER, 3, hint("b:1", 1));
        assertNotEquals("b:1", ignored.endpoint());

        Step followed = router.recordFailure("c:1", FailureKind.NOT_LEADER, 4, hint("b:1", 2));
        assertEquals("b:1", followed.endpoint());
    }

    @Test
    void aSuspicionEnds() {
        router.recordFailure("b:1", FailureKind.UNREACHABLE, 1, Optional.empty());
        clock.addAndGet(LeaderRouter.SUSPICION.toNanos() + 1);
        Step step = router.recordFailure("a:1", FailureKind.NOT_LEADER, 2, hint("b:1", 1));
        assertEquals("b:1", step.endpoint());
    }

    @Test
    void theRotationAsksTheOldestFailureNext() {
        router.recordFailure("a:1", FailureKind.UNREACHABLE, 1, Optional.empty());
        Step second = router.recordFailure("b:1", FailureKind.UNREACHABLE, 2, Optional.empty());
        assertEquals("c:1", second.endpoint());
        assertEquals(Duration.ZERO, second.delay());
        Step third = router.recordFailure("c:1", FailureKind.UNREACHABLE, 3, Optional.empty());
        assertEquals("a:1", third.endpoint());
        assertTrue(third.delay().compareTo(Duration.ZERO) > 0, "a round over dead endpoints has no wait");
    }

    @Test
    void aLeaderThatAcceptsNothingIsAskedAgain() {
        router.recordAnswer("a:1");
        Step step = router.recordFailure("a:1", FailureKind.NOT_NOW, 1, Optional.empty());
        assertEquals("a:1", step.endpoint());
        assertTrue(step.delay().toMillis() >= 25);
        assertNotEquals(
                "a:1", router.recordFailure("a:1", FailureKind.NOT_NOW, 4, Optional.empty()).endpoint());
    }

    @Test
    void shortDeadlinesAddUpToAHangingEndpoint() {
        router.recordAnswer("a:1");
        for (int call = 0; call < 4; call++) {
            assertEquals("a:1", router.first());
            router.recordTimeout("a:1", Duration.ofMillis(500));
        }
        assertNotEquals("a:1", router.first());
    }

    @Test
    void onlyAnotherLeaderIsAChange() {
        router.recordAnswer("a:1");
        router.recordAnswer("a:1");
        assertEquals(0, leaderChanges.get());
        router.recordAnswer("b:1");
        assertEquals(1, leaderChanges.get());
    }

    private static Optional<Failure.Hint> hint(String endpoint, long epoch) {
        return Optional.of(new Failure.Hint(endpoint, epoch));
    }
}
