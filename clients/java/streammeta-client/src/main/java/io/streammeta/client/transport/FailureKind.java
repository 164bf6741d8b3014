package io.streammeta.client.transport;

/** Failures after which the same request may be sent again. */
public enum FailureKind {
    /** No connection, or it broke: this controller may be gone. */
    UNREACHABLE,
    /** Connected, but no answer in the time of one attempt. */
    TIMED_OUT,
    /** Answered by a controller that does not lead. */
    NOT_LEADER,
    /** It led, and lost leadership while it replicated the request. */
    OUTCOME_UNKNOWN,
    /** It leads and accepted nothing: a full disk, too much in flight, a quota. */
    NOT_NOW
}
