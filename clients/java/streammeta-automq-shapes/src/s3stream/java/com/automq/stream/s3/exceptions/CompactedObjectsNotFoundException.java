package com.automq.stream.s3.exceptions;

/** Shape of the error of a commit whose objects are gone. */
public class CompactedObjectsNotFoundException extends AutoMQException {}
