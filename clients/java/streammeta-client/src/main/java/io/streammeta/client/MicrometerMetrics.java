package io.streammeta.client;

import io.micrometer.core.instrument.FunctionCounter;
import io.micrometer.core.instrument.FunctionTimer;
import io.micrometer.core.instrument.MeterRegistry;
import io.micrometer.core.instrument.binder.MeterBinder;
import java.util.concurrent.TimeUnit;
import java.util.function.ToDoubleFunction;

/** Publishes the counters of a client in a registry of Micrometer, which the application brings. */
public final class MicrometerMetrics implements MeterBinder {
    private final ClientMetrics metrics;

    /** Publishes the counters of one client. */
    public MicrometerMetrics(ClientMetrics metrics) {
        this.metrics = metrics;
    }

    @Override
    public void bindTo(MeterRegistry registry) {
        counter(registry, "streammeta.client.calls", ClientMetrics::calls);
        counter(registry, "streammeta.client.errors", ClientMetrics::errors);
        counter(registry, "streammeta.client.leader.changes", ClientMetrics::leaderChanges);
        counter(registry, "streammeta.client.watch.restarts", ClientMetrics::watchRestarts);
        for (String kind : metrics.failedAttempts().keySet()) {
            FunctionCounter.builder("streammeta.client.failed.attempts", metrics, counted -> counted.failedAttempts()
                            .get(kind))
                    .tag("kind", kind)
                    .register(registry);
        }

        commits(registry, "accepted", ClientMetrics::commitsAccepted);
        commits(registry, "rejected", ClientMetrics::commitsRejected);
        commits(registry, "unanswered", ClientMetrics::commitsUnanswered);
        FunctionTimer.builder(
                        "streammeta.client.commit.time",
                        metrics,
                        counted -> counted.commitsAccepted() + counted.commitsRejected(),
                        ClientMetrics::commitNanos,
                        TimeUnit.NANOSECONDS)
                .register(registry);
    }

    private void counter(MeterRegistry registry, String name, ToDoubleFunction<ClientMetrics> count) {
        FunctionCounter.builder(name, metrics, count).register(registry);
    }

    private void commits(MeterRegistry registry, String outcome, ToDoubleFunction<ClientMetrics> count) {
        FunctionCounter.builder("streammeta.client.commits", metrics, count)
                .tag("outcome", outcome)
                .register(registry);
    }
}
