package io.streammeta.client.errors;

import java.util.Map;

/** Base class of the client's errors. There is one class for each different reaction of a broker. */
public abstract class StreammetaException extends RuntimeException {
    private static final long serialVersionUID = 1L;

    private final String reason;
    private final Map<String, String> metadata;
    private final String nextStep;
    private final boolean retriable;

    StreammetaException(
            String message, String reason, Map<String, String> metadata, String nextStep, boolean retriable) {
        super(message);
        this.reason = reason;
        this.metadata = Map.copyOf(metadata);
        this.nextStep = nextStep;
        this.retriable = retriable;
    }

    /** Returns the reason for programs, such as {@code DISK_FULL} or {@code STREAM_FENCED}, empty without one. */
    public final String reason() {
        return reason;
    }

    /** Returns the metadata of the reason. docs/protocol.md lists it. */
    public final Map<String, String> metadata() {
        return metadata;
    }

    /** Returns the field that breaks a rule or a limit, empty if the error concerns none. */
    public final String field() {
        return metadata.getOrDefault("field", "");
    }

    /** Returns what to do, for people. */
    public final String nextStep() {
        return nextStep;
    }

    /**
     * Returns whether a retry of the same call, unchanged, may succeed. The failed call may still have had an effect.
     */
    public final boolean isRetriable() {
        return retriable;
    }
}
