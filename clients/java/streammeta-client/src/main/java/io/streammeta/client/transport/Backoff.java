package io.streammeta.client.transport;

import java.time.Duration;

/** Waits that double from {@code first} up to {@code longest}. Half of each is random. */
record Backoff(Duration first, Duration longest) {
    /** Waits between rounds over all endpoints. */
    static final Backoff ELECTION = new Backoff(Duration.ofMillis(10), Duration.ofMillis(250));
    /** Waits after temporary rejections. To free a disk takes longer than an election. */
    static final Backoff REFUSAL = new Backoff(Duration.ofMillis(50), Duration.ofSeconds(1));

    /** Returns the wait after failed attempt {@code attempt}, from 0 on. {@code random} is in [0, 1). */
    Duration after(int attempt, double random) {
        double whole = Math.min(longest.toNanos(), first.toNanos() * Math.pow(2, Math.min(attempt, 30)));
        // The random half separates callers that failed together.
        return Duration.ofNanos((long) (whole * (0.5 + 0.5 * random)));
    }
}
