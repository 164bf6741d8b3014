package com.automq.stream.s3.exceptions;

/** Shape of an error of s3stream. */
public class AutoMQException extends RuntimeException {
    public AutoMQException() {}

    public AutoMQException(String message) {
        super(message);
    }

    public AutoMQException(String message, Throwable cause) {
        super(message, cause);
    }
}
