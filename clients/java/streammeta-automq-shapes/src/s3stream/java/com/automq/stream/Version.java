package com.automq.stream;

/** Shape of the version of s3stream. */
public enum Version {}
