package org.apache.kafka.common.errors;

/** Shape of Kafka's errors. */
public class ApiException extends RuntimeException {
    public ApiException(String message) {
        super(message);
    }
}
