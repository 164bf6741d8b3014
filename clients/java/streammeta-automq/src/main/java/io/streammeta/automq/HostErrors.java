package io.streammeta.automq;

import io.streammeta.client.errors.RejectedException;

/** Translation of rejections into the exceptions that the host of s3stream expects. */
@FunctionalInterface
public interface HostErrors {
    /** Keeps the exceptions of the client. */
    HostErrors NONE = rejection -> rejection;

    /** Returns the exception of the host, with the rejection or its words inside. */
    RuntimeException translate(RejectedException rejection);
}
