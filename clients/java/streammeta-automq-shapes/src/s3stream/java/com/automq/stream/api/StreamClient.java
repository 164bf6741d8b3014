package com.automq.stream.api;

/** Shape of the streams of a client. */
public interface StreamClient {}
