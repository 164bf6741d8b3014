package com.automq.stream.api.exceptions;

/** Shape of an error of a stream. */
public class StreamClientException extends RuntimeException {
    private final int code;

    public StreamClientException(int code, String message, Throwable cause) {
        super(message, cause);
        this.code = code;
    }

    public int getCode() {
        return code;
    }
}
