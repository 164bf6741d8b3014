package com.automq.stream.s3.objects;

/** Shape of the answer to a commit. */
public class CommitStreamSetObjectResponse {}
