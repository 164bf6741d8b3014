package io.streammeta.client.errors;

import java.util.Map;

/** The client, session or pipeline was closed before, or during, a call. Unanswered commits may be committed. */
public final class ClientClosedException extends StreammetaException {
    private static final long serialVersionUID = 1L;

    /** Describes a call that met a closed client. */
    public ClientClosedException(String call) {
        super(call + ": the client is closed", "", Map.of(), "create a new one", false);
    }
}
