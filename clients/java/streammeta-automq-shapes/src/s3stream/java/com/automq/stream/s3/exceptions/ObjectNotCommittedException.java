package com.automq.stream.s3.exceptions;

/** Shape of the error of a compaction of an object that is not committed. */
public class ObjectNotCommittedException extends AutoMQException {}
