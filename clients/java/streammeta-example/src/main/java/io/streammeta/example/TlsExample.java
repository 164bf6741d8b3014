package io.streammeta.example;

import io.streammeta.client.StreammetaClient;
import io.streammeta.client.TlsFiles;
import java.nio.file.Path;

/** A client over TLS. */
public final class TlsExample {
    private TlsExample() {}

    /** Connects with the certificate of broker 1. */
    public static StreammetaClient connect() {
        StreammetaClient client = StreammetaClient.builder()
                .endpoints("controller-1:9091", "controller-2:9091", "controller-3:9091")
                .tls(new TlsFiles(Path.of("ca.pem"), Path.of("broker-1.pem"), Path.of("broker-1.key")))
                .build();
        return client;
    }
}
