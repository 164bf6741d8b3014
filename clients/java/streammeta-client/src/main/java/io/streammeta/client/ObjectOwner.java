package io.streammeta.client;

/** Owner of a named object, which is destroyed together with it. */
public sealed interface ObjectOwner {
    /**
     * A stream that owns objects.
     *
     * @param streamId the stream
     */
    record Stream(long streamId) implements ObjectOwner {}

    /**
     * A key that owns objects.
     *
     * @param namespace the namespace, empty for the default one
     * @param key the key
     */
    record Key(String namespace, String key) implements ObjectOwner {}
}
