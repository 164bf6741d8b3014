package io.streammeta.rocketmq;

import io.streammeta.client.TlsFiles;
import java.io.IOException;
import java.io.Reader;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;

/**
 * Settings of the plug-in, from the properties file that {@code tieredStoreFilePath} names.
 *
 * @param controllers the controllers, each as HOST:PORT
 * @param bucket the address of the object store
 * @param nodeId the id of the broker as a node of the cluster
 * @param tls the certificates, null for plain text
 */
record TierSettings(List<String> controllers, String bucket, int nodeId, TlsFiles tls) {
    private static final Set<String> REQUIRED = Set.of("controllers", "bucket", "node.id");
    private static final Set<String> OF_TLS = Set.of("tls.ca", "tls.certificate", "tls.key");

    /**
     * Reads a file.
     *
     * @throws IllegalArgumentException if the file can't be read, or if settings are missing, unknown or invalid
     */
    static TierSettings read(Path file) {
        Properties properties = new Properties();
        try (Reader reader = Files.newBufferedReader(file)) {
            properties.load(reader);
        } catch (IOException error) {
            throw new IllegalArgumentException("the settings of the tier can't be read from '" + file
                    + "'. Let tieredStoreFilePath in broker.conf name their file", error);
        }

        Set<String> missing = new TreeSet<>(REQUIRED);
        boolean hasTls = properties.stringPropertyNames().stream().anyMatch(OF_TLS::contains);
        missing.addAll(hasTls ? OF_TLS : Set.of());
        Set<String> unknown = new TreeSet<>(properties.stringPropertyNames());
        unknown.removeAll(REQUIRED);
        unknown.removeAll(OF_TLS);
        missing.removeAll(properties.stringPropertyNames());
        if (!missing.isEmpty() || !unknown.isEmpty()) {
            throw new IllegalArgumentException("file '" + file + "' lacks " + missing + " and has the unknown settings "
                    + unknown + ". Correct its names");
        }

        TlsFiles tls = hasTls
                ? new TlsFiles(
                        Path.of(properties.getProperty("tls.ca")),
                        Path.of(properties.getProperty("tls.certificate")),
                        Path.of(properties.getProperty("tls.key")))
                : null;
        return new TierSettings(
                List.of(properties.getProperty("controllers").trim().split("\\s*,\\s*")),
                properties.getProperty("bucket").trim(),
                nodeId(properties.getProperty("node.id").trim()),
                tls);
    }

    private static int nodeId(String value) {
        if (!value.matches("[0-9]{1,9}")) {
            throw new IllegalArgumentException("node.id is '" + value + "', expected a number from 0 to 999999999");
        }
        return Integer.parseInt(value);
    }
}
