package io.streammeta.client;

import java.time.Duration;
import java.util.Map;

/**
 * Options of a session.
 *
 * @param walConfig where the node's write-ahead log is, opaque to the controllers
 * @param tags the labels of the node, at most 16
 * @param timeout the silence after which the node is fenced, at least 2 seconds. Zero: the controllers' own
 * @param listener the callbacks
 */
public record SessionOptions(String walConfig, Map<String, String> tags, Duration timeout, SessionListener listener) {
    /** The options of a session without a log, tags and callbacks. */
    public static final SessionOptions DEFAULT =
            new SessionOptions("", Map.of(), Duration.ZERO, SessionListener.NONE);

    /** Returns these options with another place of the write-ahead log. */
    public SessionOptions withWalConfig(String walConfig) {
        return new SessionOptions(walConfig, tags, timeout, listener);
    }

    /** Returns these options with other tags. */
    public SessionOptions withTags(Map<String, String> tags) {
        return new SessionOptions(walConfig, tags, timeout, listener);
    }

    /** Returns these options with another timeout. */
    public SessionOptions withTimeout(Duration timeout) {
        return new SessionOptions(walConfig, tags, timeout, listener);
    }

    /** Returns these options with other callbacks. */
    public SessionOptions withListener(SessionListener listener) {
        return new SessionOptions(walConfig, tags, timeout, listener);
    }
}
