package io.streammeta.client.errors;

import java.io.Serializable;
import java.util.Map;

/**
 * Facts of a rejection by the controllers.
 *
 * @param subject the rejected item or call, such as {@code "stream 7"}
 * @param code the error code of an item, null for a whole call
 * @param reason the name of the code, or the {@code google.rpc.ErrorInfo} reason of a call, empty without one
 * @param detail the controller's message, or an addition of the client
 * @param metadata the metadata of the reason, such as {@code field} and {@code limit}
 */
public record Rejection(String subject, ErrorCode code, String reason, String detail, Map<String, String> metadata)
        implements Serializable {
    String sentence(String nextStep) {
        String with = reason.isEmpty() ? "" : " with " + reason;
        String words = detail.isEmpty() ? "" : " (" + detail + ")";
        return subject + " was rejected" + with + words + ". Next step: " + nextStep;
    }
}
