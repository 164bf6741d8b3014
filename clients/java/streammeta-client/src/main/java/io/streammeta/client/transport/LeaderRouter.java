package io.streammeta.client.transport;

import java.time.Duration;
import java.util.ArrayList;
import java.util.Collection;
import java.util.Comparator;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.function.LongSupplier;
import java.util.random.RandomGenerator;

/**
 * Belief in one leader at a time. After a failure it follows hints, or rotates.
 *
 * <p>All calls of a client share one router, so that one call's discovery of the leader serves the others. It does no
 * I/O. The rotation contains the configured endpoints and those learned from hints and answers. It next asks the
 * endpoint whose last failure is the oldest.
 *
 * <p>A hint that names a controller which just failed is ignored, because a follower notices later than a client that
 * its leader is dead. Such a suspicion ends when the quorum epoch grows and after {@link #SUSPICION}, because a
 * connection may break without an election. A hanging controller costs the whole time of an attempt, so the rotation
 * skips it while it is suspected.
 */
final class LeaderRouter {
    /** Time for which a failed controller is suspected, longer than an election. */
    static final Duration SUSPICION = Duration.ofSeconds(3);

    /** Every so many temporary rejections another controller is tried: the leader may not know its successor. */
    private static final int LOOK_ROUND = 4;
    /** Every so many failures of a call the rotation decides, regardless of hints, which may lead in a circle. */
    private static final int LOOK_ROUND_OF_HINTS = 6;
    /** Rounds after which a call ignores suspicions. */
    private static final int ROUNDS_OF_SUSPICION = 8;
    /** Total time that callers wait for a silent controller until it counts as hanging. */
    private static final Duration GIVEN_UP = Duration.ofSeconds(2);
    /** Time for which hints of earlier epochs are ignored. A restored cluster begins with epoch 1 again. */
    private static final Duration EPOCH_KEPT = Duration.ofSeconds(10);

    private static final int LEARNED_MAX = 16;

    /** Next attempt: at {@code endpoint}, after {@code delay}. */
    record Step(String endpoint, Duration delay) {}

    private record Suspicion(long endsAt, boolean hangs) {}

    private final List<String> endpoints;
    private final RandomGenerator random;
    private final LongSupplier nanoTime;
    private final Runnable onLeaderChange;

    private List<String> known;
    private String leader;
    private boolean isProven; // the believed leader has answered, and has not failed since
    private String answered = "";
    private long epoch = -1;
    private long epochHeardAt;
    private int failures;
    private int turn;
    private final Map<String, Suspicion> suspects = new HashMap<>();
    private final Map<String, Long> waitedNanos = new HashMap<>();
    private final Map<String, Integer> lastFailures = new HashMap<>();

    LeaderRouter(
            List<String> endpoints, RandomGenerator random, LongSupplier nanoTime, Runnable onLeaderChange) {
        this.endpoints = List.copyOf(endpoints);
        this.known = this.endpoints;
        this.random = random;
        this.nanoTime = nanoTime;
        this.onLeaderChange = onLeaderChange;
        // A random start spreads the first calls of many clients over the controllers.
        this.turn = random.nextInt(endpoints.size());
    }

    synchronized List<String> known() {
        return known;
    }

    synchronized Optional<String> leader() {
        return Optional.ofNullable(leader);
    }

    /** Replaces the learned endpoints with a list of all controllers. Empty endpoints are unknown ones. */
    synchronized void learn(Collection<String> listed) {
        if (listed.stream().allMatch(String::isEmpty)) {
            return;
        }
        known = endpoints;
        listed.forEach(this::know);
        know(leader);
    }

    /** Returns where a new call starts: at the believed leader, or in the rotation. */
    synchronized String first() {
        return leader != null ? leader : nextInRotation(1);
    }

    /** Records that an endpoint answered as the leader. */
    synchronized void recordAnswer(String endpoint) {
        leader = endpoint;
        isProven = true;
        know(endpoint);
        // As long as the leader answers, hints of earlier epochs stay outdated.
        epochHeardAt = nanoTime.getAsLong();
        if (!endpoint.equals(answered)) {
            if (!answered.isEmpty()) {
                onLeaderChange.run();
            }
            answered = endpoint;
        }
        suspects.remove(endpoint);
        waitedNanos.remove(endpoint);
    }

    /**
     * Records that a caller ran out of time while it waited for an endpoint. Callers with short deadlines never see an
     * attempt time out: the sum of their waits is the evidence that the endpoint hangs.
     */
    synchronized void recordTimeout(String endpoint, Duration waited) {
        long total = waitedNanos.merge(endpoint, waited.toNanos(), Long::sum);
        if (total >= GIVEN_UP.toNanos()) {
            recordFailure(endpoint, FailureKind.TIMED_OUT, 1, Optional.empty());
        }
    }

    /** Chooses the next step after {@code count} failed attempts of a call, the last at {@code endpoint}. */
    synchronized Step recordFailure(String endpoint, FailureKind kind, int count, Optional<Failure.Hint> hint) {
        lastFailures.put(endpoint, ++failures);
        // The leader answered, so that neither the belief nor a suspicion changes.
        if (kind == FailureKind.NOT_NOW) {
            return putOff(endpoint, count);
        }

        boolean isSilent = kind == FailureKind.UNREACHABLE || kind == FailureKind.TIMED_OUT;
        if (isSilent) {
            suspect(endpoint, kind == FailureKind.TIMED_OUT);
        }
        // Another call may have found a new leader meanwhile. Then that belief stays.
        if (endpoint.equals(leader)) {
            leader = null;
        }
        String hinted = hint.flatMap(told -> accept(endpoint, told, count)).orElse(leader);
        if (hinted != null && count % LOOK_ROUND_OF_HINTS != 0) {
            // Hints of the first round are followed at once. Later ones probably lead in a circle.
            return new Step(hinted, count <= known.size() ? Duration.ZERO : pause(count));
        }
        // In the first round over dead endpoints another one may lead.
        boolean isFree = isSilent && count < known.size();
        return new Step(rotate(endpoint, count), isFree ? Duration.ZERO : pause(count));
    }

    private Step putOff(String endpoint, int count) {
        Duration wait = Backoff.REFUSAL.after(count - 1, random.nextDouble());
        if (leader != null && !leader.equals(endpoint)) {
            return new Step(leader, wait);
        }
        return new Step(count % LOOK_ROUND == 0 ? rotate(endpoint, count) : endpoint, wait);
    }

    /** Returns the endpoint of a hint worth following, which becomes the belief. */
    private Optional<String> accept(String endpoint, Failure.Hint hint, int count) {
        if (hint.endpoint().isEmpty() || isOutdated(hint, count)) {
            return Optional.empty();
        }
        if (hint.epoch() > epoch) {
            // A new epoch may have a new leader, so the former one has to answer again.
            isProven = false;
            if (epoch >= 0) { // the suspects may be of the first known epoch
                suspects.clear();
            }
        }
        epoch = hint.epoch();
        epochHeardAt = nanoTime.getAsLong();

        know(hint.endpoint());
        // A hint to its own sender or to a suspect leads nowhere.
        if (hint.endpoint().equals(endpoint) || isSuspected(hint.endpoint(), count)) {
            return Optional.empty();
        }
        if (leader != null && isProven) {
            return Optional.empty(); // it has answered, and this hint is of no later epoch
        }
        // The suspicion has expired. One call tries the endpoint, and the others wait for its result.
        if (suspects.containsKey(hint.endpoint())) {
            return Optional.of(probe(hint.endpoint()));
        }
        leader = hint.endpoint();
        isProven = false;
        return Optional.of(leader);
    }

    private boolean isOutdated(Failure.Hint hint, int count) {
        boolean isRecent = nanoTime.getAsLong() - epochHeardAt <= EPOCH_KEPT.toNanos();
        return hint.epoch() < epoch && isRecent && !ignoresSuspicions(count);
    }

    /** Adds an endpoint to the rotation. A full rotation drops the oldest learned one. */
    private void know(String endpoint) {
        if (endpoint == null || endpoint.isEmpty() || known.contains(endpoint)) {
            return;
        }
        List<String> learned = new ArrayList<>(known.subList(endpoints.size(), known.size()));
        learned.add(endpoint);
        List<String> all = new ArrayList<>(endpoints);
        all.addAll(learned.subList(Math.max(0, learned.size() - LEARNED_MAX), learned.size()));
        known = List.copyOf(all);
        // Facts about endpoints outside the rotation would only fill memory.
        for (Map<String, ?> facts : List.of(suspects, waitedNanos, lastFailures)) {
            facts.keySet().retainAll(known);
        }
    }

    private void suspect(String endpoint, boolean hangs) {
        suspects.put(endpoint, new Suspicion(nanoTime.getAsLong() + SUSPICION.toNanos(), hangs));
        // The waits are used up as evidence for this suspicion.
        waitedNanos.remove(endpoint);
    }

    private boolean isSuspected(String endpoint, int count) {
        Suspicion suspicion = suspects.get(endpoint);
        return suspicion != null && !ignoresSuspicions(count) && nanoTime.getAsLong() - suspicion.endsAt() < 0;
    }

    private boolean hangs(String endpoint, int count) {
        return isSuspected(endpoint, count) && suspects.get(endpoint).hangs();
    }

    private boolean ignoresSuspicions(int count) {
        return count > ROUNDS_OF_SUSPICION * known.size();
    }

    /** Returns the endpoint. A suspect stays suspected meanwhile, so that others don't follow. */
    private String probe(String endpoint) {
        Suspicion suspicion = suspects.get(endpoint);
        if (suspicion != null) {
            suspect(endpoint, suspicion.hangs());
        }
        return endpoint;
    }

    private Duration pause(int count) {
        return Backoff.ELECTION.after((count - 1) / known.size(), random.nextDouble());
    }

    private String rotate(String endpoint, int count) {
        if (known.contains(endpoint)) {
            turn = (known.indexOf(endpoint) + 1) % known.size();
        }
        return nextInRotation(count);
    }

    /** Returns the endpoint that does not hang and has the oldest failure, ties in turn. */
    private String nextInRotation(int count) {
        int size = known.size();
        Comparator<String> rank = Comparator.<String>comparingInt(each -> lastFailures.getOrDefault(each, 0))
                .thenComparingInt(each -> Math.floorMod(known.indexOf(each) - turn, size));
        List<String> awake = known.stream().filter(each -> !hangs(each, count)).toList();
        // If all of them hang, one is asked nevertheless.
        return probe((awake.isEmpty() ? known : awake).stream().min(rank).orElseThrow());
    }
}
