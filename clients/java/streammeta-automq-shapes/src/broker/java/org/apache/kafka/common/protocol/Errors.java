package org.apache.kafka.common.protocol;

import org.apache.kafka.common.errors.ApiException;

/** Shape of Kafka's error codes, those that AutoMQ adds. */
public enum Errors {
    STREAM_NOT_EXIST,
    STREAM_FENCED,
    STREAM_NOT_OPENED,
    STREAM_NOT_CLOSED,
    OFFSET_NOT_MATCHED,
    NODE_EPOCH_EXPIRED,
    NODE_EPOCH_NOT_EXIST,
    NODE_FENCED,
    NODE_LOCKED,
    STREAM_INNER_ERROR;

    public ApiException exception(String message) {
        return new ApiException(name() + ": " + message);
    }
}
