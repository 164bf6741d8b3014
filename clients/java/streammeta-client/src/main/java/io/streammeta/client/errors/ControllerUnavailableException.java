package io.streammeta.client.errors;

import java.time.Duration;
import java.util.Map;
import java.util.stream.Collectors;

/**
 * No controller completed the call within its deadline. A call that changes something may have taken effect, a read
 * changed nothing. The reason is the last temporary one of a controller, such as {@code DISK_FULL}, empty without one.
 */
public final class ControllerUnavailableException extends StreammetaException {
    private static final long serialVersionUID = 1L;

    private static final Map<String, String> NEXT_STEPS = Map.of(
            "", "check that a majority of the controllers runs and that these endpoints are theirs",
            "DISK_FULL", "free space on the disks of the controllers",
            "BUSY", "have fewer requests in flight, or a longer deadline",
            "OBJECT_IDS_NOT_READY", "check that the controllers reach their bucket",
            "MARKER_UNSEEN", "check that the controllers reach their bucket",
            "FENCE_PENDING", "wait until the former cluster is fenced, at most half a minute");

    private final Map<String, String> tried;

    /**
     * Describes a call that ran out of time.
     *
     * @param method the call, such as {@code KVService/PutKVs}
     * @param deadline the time that the call had
     * @param tried the last failure at each endpoint
     * @param reason the last temporary reason of a controller, empty without one
     * @param isRead whether the call changes nothing
     */
    public ControllerUnavailableException(
            String method, Duration deadline, Map<String, String> tried, String reason, boolean isRead) {
        super(
                sentence(method, deadline, tried, reason, isRead),
                reason,
                Map.of(),
                NEXT_STEPS.getOrDefault(reason, "the controllers answer: their message names the obstacle"),
                true);
        this.tried = Map.copyOf(tried);
    }

    /** Returns the last failure at each endpoint that was tried. */
    public Map<String, String> tried() {
        return tried;
    }

    private static String sentence(
            String method, Duration deadline, Map<String, String> tried, String reason, boolean isRead) {
        String seen = tried.entrySet().stream()
                .map(entry -> entry.getKey() + ": " + entry.getValue())
                .collect(Collectors.joining("; "));
        String what = reason.isEmpty() ? "got no answer in " : "was rejected with " + reason + " for ";
        String after = isRead
                ? "The call changed nothing: retry it"
                : "The call may have taken effect: retry it, or open the stream again";
        return method + " " + what + deadline.toMillis() / 1000.0 + " s ("
                + (seen.isEmpty() ? "no endpoint was tried" : seen) + "). "
                + NEXT_STEPS.getOrDefault(reason, "the controllers answer: their message names the obstacle") + ". "
                + after;
    }
}
