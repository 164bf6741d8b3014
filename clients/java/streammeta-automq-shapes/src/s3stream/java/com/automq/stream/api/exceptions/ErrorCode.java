package com.automq.stream.api.exceptions;

/** Shape of the codes of stream errors. */
public class ErrorCode {
    public static final short EXPIRED_STREAM_EPOCH = 3;
}
