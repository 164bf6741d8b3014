package com.automq.stream;

import com.automq.stream.api.KVClient;

/** Shape of the process-wide context. */
public class Context {
    private static final Context INSTANCE = new Context();

    private KVClient kvClient;

    public static Context instance() {
        return INSTANCE;
    }

    public KVClient kvClient() {
        return kvClient;
    }

    public void kvClient(KVClient kvClient) {
        this.kvClient = kvClient;
    }
}
