package io.streammeta.pulsar;

import io.streammeta.client.TlsFiles;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalInt;
import java.util.Set;
import java.util.TreeSet;

/**
 * Options of an offloader. In the broker's configuration their names follow
 * {@code managedLedgerOffloadExtraConfig}, as in {@code managedLedgerOffloadExtraConfigEndpoints}.
 *
 * @param endpoints the controllers, each HOST:PORT. Required
 * @param bucket the address of the cluster's bucket, {@code s3://} or {@code file:///}. Required
 * @param prefix the first part of the names of copies. The default is {@code pulsar/}
 * @param tls the files {@code TlsCa}, {@code TlsCertificate} and {@code TlsKey}, all or none
 * @param nodeId the node that this broker is for the controllers. By default they issue one for each start
 * @param workDirectory the folder for copies that are not uploaded yet. The default is the JVM's temporary folder
 */
record OffloaderSettings(
        List<String> endpoints,
        String bucket,
        String prefix,
        Optional<TlsFiles> tls,
        OptionalInt nodeId,
        Path workDirectory) {
    static final String DEFAULT_PREFIX = "pulsar/";
    private static final String OPTION = "managedLedgerOffloadExtraConfig";
    private static final List<String> TLS = List.of("TlsCa", "TlsCertificate", "TlsKey");
    private static final Set<String> KNOWN = Set.of(
            "Endpoints", "Bucket", "Prefix", "NodeId", "WorkDirectory", TLS.get(0), TLS.get(1), TLS.get(2));

    /**
     * Returns the settings of options by the end of their names.
     *
     * @throws IllegalArgumentException for a missing, unknown or invalid option
     */
    static OffloaderSettings of(Map<String, String> options) {
        Set<String> unknown = new TreeSet<>(options.keySet());
        unknown.removeAll(KNOWN);
        if (!unknown.isEmpty()) {
            throw new IllegalArgumentException(
                    "option " + OPTION + unknown.iterator().next() + " is unknown, expected one of " + new TreeSet<>(KNOWN));
        }

        String nodeId = options.getOrDefault("NodeId", "");
        if (!nodeId.matches("[0-9]{0,9}")) {
            throw new IllegalArgumentException("option " + OPTION + "NodeId is '" + nodeId + "', expected a number");
        }
        return new OffloaderSettings(
                Arrays.stream(required(options, "Endpoints").split(","))
                        .map(String::trim)
                        .toList(),
                required(options, "Bucket"),
                options.getOrDefault("Prefix", DEFAULT_PREFIX),
                tls(options),
                nodeId.isEmpty() ? OptionalInt.empty() : OptionalInt.of(Integer.parseInt(nodeId)),
                Path.of(options.getOrDefault("WorkDirectory", System.getProperty("java.io.tmpdir"))));
    }

    private static Optional<TlsFiles> tls(Map<String, String> options) {
        if (TLS.stream().noneMatch(options::containsKey)) {
            return Optional.empty();
        }
        List<Path> files = TLS.stream().map(name -> Path.of(required(options, name))).toList();
        return Optional.of(new TlsFiles(files.get(0), files.get(1), files.get(2)));
    }

    private static String required(Map<String, String> options, String name) {
        String value = options.getOrDefault(name, "").trim();
        if (value.isEmpty()) {
            throw new IllegalArgumentException("option " + OPTION + name + " is not set. Set it in the broker's configuration");
        }
        return value;
    }
}
