package io.streammeta.client.transport;

import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;

/** Search of one call, or of one stream of calls, for a controller that answers. Used by one thread at a time. */
final class LeaderSearch {
    /** Upper bound of a wait that a controller requests. */
    private static final Duration RETRY_AFTER_MAX = Duration.ofSeconds(60);

    private final LeaderRouter router;
    private final Map<String, String> tried = new LinkedHashMap<>();
    private String endpoint;
    private String refusal = "";
    private int failures;

    LeaderSearch(LeaderRouter router) {
        this.router = router;
        this.endpoint = router.first();
    }

    /** Returns the next endpoint to ask. */
    String endpoint() {
        return endpoint;
    }

    /** Returns the last failure at each endpoint, including the one that is asked now. */
    Map<String, String> tried() {
        Map<String, String> seen = new LinkedHashMap<>(tried);
        seen.putIfAbsent(endpoint, "no answer yet");
        return seen;
    }

    /** Returns the last temporary reason of the leader, empty without one. */
    String refusal() {
        return refusal;
    }

    /** Records that the endpoint answered as the leader. The search starts again. */
    void recordAnswer() {
        router.recordAnswer(endpoint);
        failures = 0;
        tried.clear();
        refusal = "";
    }

    /** Records that the attempt failed. Returns the wait before the next one, empty if the same request fails again. */
    Optional<Duration> recordFailure(Failure failure) {
        Optional<FailureKind> kind = failure.kind();
        if (kind.isEmpty()) {
            return Optional.empty();
        }
        LeaderRouter.Step step = router.recordFailure(endpoint, kind.get(), ++failures, failure.hint());
        tried.put(endpoint, failure.text());
        endpoint = step.endpoint();
        if (kind.get() != FailureKind.NOT_NOW) {
            return Optional.of(step.delay());
        }

        refusal = failure.reason();
        // The controller's wait is a minimum, with a bound against nonsense.
        Duration asked = failure.retryAfter().compareTo(RETRY_AFTER_MAX) > 0 ? RETRY_AFTER_MAX : failure.retryAfter();
        return Optional.of(step.delay().compareTo(asked) > 0 ? step.delay() : asked);
    }
}
