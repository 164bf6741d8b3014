package org.apache.kafka.server.common.automq;

import com.automq.stream.Version;

/** Shape of AutoMQ's version. */
public class AutoMQVersion {
    public Version s3streamVersion() {
        throw new UnsupportedOperationException();
    }
}
