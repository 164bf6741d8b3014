package io.streammeta.client;

import static org.junit.jupiter.api.Assertions.assertEquals;

import io.micrometer.core.instrument.simple.SimpleMeterRegistry;
import io.streammeta.client.transport.FailureKind;
import org.junit.jupiter.api.Test;

class MicrometerMetricsTest {
    @Test
    void theCountersOfAClientArePublished() {
        ClientMetrics metrics = new ClientMetrics();
        SimpleMeterRegistry registry = new SimpleMeterRegistry();
        new MicrometerMetrics(metrics).bindTo(registry);

        metrics.countCall();
        metrics.countCall();
        metrics.countFailure(FailureKind.NOT_LEADER);
        metrics.countCommit(true, 3_000_000);
        metrics.countCommit(false, 1_000_000);

        assertEquals(2, registry.get("streammeta.client.calls").functionCounter().count());
        assertEquals(
                1,
                registry.get("streammeta.client.failed.attempts")
                        .tag("kind", "not_leader")
                        .functionCounter()
                        .count());
        assertEquals(
                1,
                registry.get("streammeta.client.commits")
                        .tag("outcome", "rejected")
                        .functionCounter()
                        .count());
        assertEquals(2, registry.get("streammeta.client.commit.time").functionTimer().count());
    }
}
