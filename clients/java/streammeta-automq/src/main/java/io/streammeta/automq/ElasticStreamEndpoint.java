package io.streammeta.automq;

import io.streammeta.client.StreammetaClient;
import io.streammeta.client.TlsFiles;
import java.net.URI;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.stream.Collectors;

/**
 * The value of AutoMQ's option {@code elasticstream.endpoint}:
 * {@code streammeta://HOST:PORT,HOST:PORT[?ca=FILE&certificate=FILE&key=FILE]}.
 *
 * @param controllers the addresses of controllers, one or more
 * @param tls the files of TLS, empty for plain text
 */
public record ElasticStreamEndpoint(List<String> controllers, Optional<TlsFiles> tls) {
    private static final String SCHEME = "streammeta";
    private static final Set<String> TLS_FILES = Set.of("ca", "certificate", "key");

    /** Returns the endpoint of an option's value. Throws {@link IllegalArgumentException} if it has another form. */
    public static ElasticStreamEndpoint parse(String value) {
        URI uri = URI.create(value);
        if (!SCHEME.equals(uri.getScheme()) || uri.getAuthority() == null) {
            throw new IllegalArgumentException(
                    "elasticstream.endpoint is '" + value + "', expected streammeta://HOST:PORT,HOST:PORT");
        }
        Map<String, Path> files = uri.getQuery() == null ? Map.of() : files(uri.getQuery());
        if (!files.isEmpty() && !files.keySet().equals(TLS_FILES)) {
            throw new IllegalArgumentException("elasticstream.endpoint has the files " + files.keySet()
                    + ", expected ca, certificate and key for TLS, or none for plain text");
        }
        return new ElasticStreamEndpoint(
                List.of(uri.getAuthority().split(",")),
                files.isEmpty()
                        ? Optional.empty()
                        : Optional.of(new TlsFiles(files.get("ca"), files.get("certificate"), files.get("key"))));
    }

    private static Map<String, Path> files(String query) {
        return Arrays.stream(query.split("&"))
                .map(parameter -> parameter.split("=", 2))
                .collect(Collectors.toMap(pair -> pair[0], pair -> Path.of(pair.length == 2 ? pair[1] : "")));
    }

    StreammetaClient newClient() {
        StreammetaClient.Builder builder = StreammetaClient.builder().endpoints(controllers);
        tls.ifPresent(builder::tls);
        return builder.build();
    }
}
