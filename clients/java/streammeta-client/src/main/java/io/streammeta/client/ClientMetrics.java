package io.streammeta.client;

import io.streammeta.client.transport.FailureKind;
import java.util.EnumMap;
import java.util.Locale;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.atomic.LongAdder;

/** Counters of a client since its start. {@link MicrometerMetrics} publishes them. */
public final class ClientMetrics {
    private final LongAdder calls = new LongAdder();
    private final LongAdder errors = new LongAdder();
    private final LongAdder leaderChanges = new LongAdder();
    private final LongAdder watchRestarts = new LongAdder();
    private final LongAdder commitsAccepted = new LongAdder();
    private final LongAdder commitsRejected = new LongAdder();
    private final LongAdder commitsUnanswered = new LongAdder();
    private final LongAdder commitNanos = new LongAdder();
    private final Map<FailureKind, LongAdder> failures = new EnumMap<>(FailureKind.class);

    /** Creates counters at zero. */
    public ClientMetrics() {
        for (FailureKind kind : FailureKind.values()) {
            failures.put(kind, new LongAdder());
        }
    }

    /** Returns the number of calls. A call that was sent several times counts once. */
    public long calls() {
        return calls.sum();
    }

    /** Returns the number of calls that failed: rejected, out of time, or closed. */
    public long errors() {
        return errors.sum();
    }

    /** Returns how often another controller answered as the leader. */
    public long leaderChanges() {
        return leaderChanges.sum();
    }

    /** Returns how often a watch continued at a controller after a failure. */
    public long watchRestarts() {
        return watchRestarts.sum();
    }

    /** Returns the number of commits through pipelines that were accepted. */
    public long commitsAccepted() {
        return commitsAccepted.sum();
    }

    /** Returns the number of commits through pipelines that were rejected. */
    public long commitsRejected() {
        return commitsRejected.sum();
    }

    /** Returns the number of commits through pipelines that got no answer in time. */
    public long commitsUnanswered() {
        return commitsUnanswered.sum();
    }

    /** Returns the total time from submission to answer of the commits through pipelines, in ns. */
    public long commitNanos() {
        return commitNanos.sum();
    }

    /** Returns the number of failed attempts after which a request was sent again, by kind, such as "not_leader". */
    public Map<String, Long> failedAttempts() {
        Map<String, Long> counts = new TreeMap<>();
        failures.forEach((kind, count) -> counts.put(kind.name().toLowerCase(Locale.ROOT), count.sum()));
        return counts;
    }

    /** Counts a call. For the client's own use, as the methods below. */
    public void countCall() {
        calls.increment();
    }

    /** Counts a failed call. */
    public void countError() {
        errors.increment();
    }

    /** Counts a new leader. */
    public void countLeaderChange() {
        leaderChanges.increment();
    }

    /** Counts a failed attempt. */
    public void countFailure(FailureKind kind) {
        failures.get(kind).increment();
    }

    /** Counts a watch that continues after a failure. */
    public void countWatchRestart() {
        watchRestarts.increment();
    }

    /** Counts an answered commit. */
    public void countCommit(boolean isAccepted, long nanos) {
        (isAccepted ? commitsAccepted : commitsRejected).increment();
        commitNanos.add(nanos);
    }

    /** Counts a commit without an answer. */
    public void countUnansweredCommit() {
        commitsUnanswered.increment();
    }
}
