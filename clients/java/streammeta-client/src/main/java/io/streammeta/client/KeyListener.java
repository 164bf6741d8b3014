package io.streammeta.client;

/** Callbacks of {@link KeyFollower}, one at a time. A listener that blocks holds back the changes after. */
public interface KeyListener {
    /** Reports a value that is new to the listener. */
    void onPut(KeyValue value);

    /** Reports that a key, which was reported before, is gone. */
    void onDeleted(String key);
}
