package io.streammeta.store;

import java.net.URI;
import java.net.URLDecoder;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Optional;
import java.util.Set;

/**
 * A bucket and its connection settings.
 *
 * @param bucket the name of the bucket
 * @param endpoint the address of the server, empty for Amazon
 * @param region the region
 * @param accessKey the access key, empty to take both keys from the environment
 * @param secretKey the secret key
 * @param isPathStyle whether the bucket is in the path of requests, not in the host
 * @param checksum the checksum of uploads
 */
record S3Address(
        String bucket,
        Optional<URI> endpoint,
        String region,
        String accessKey,
        String secretKey,
        boolean isPathStyle,
        Checksum checksum) {
    private static final Set<String> BUCKET_FORM =
            Set.of("endpoint", "region", "pathStyle", "accessKey", "secretKey", "checksum");
    private static final Map<String, String> SERVER_FORM = Map.of(
            "s3-region", "region",
            "s3-path-style", "pathStyle",
            "s3-access-key", "accessKey",
            "s3-secret-key", "secretKey");
    private static final Set<String> SERVER_ONLY = Set.of("s3-data-bucket", "s3-endpoint-protocol");
    private static final Set<String> IGNORED = Set.of("s3-ops-bucket", "cluster-id");

    /** Checksum of uploads. */
    enum Checksum {
        /** The header Content-MD5, which servers of all ages check. */
        MD5,
        /** Stored with the object. */
        CRC32,
        /** Stored with the object. */
        CRC32C
    }

    /** Parses either form. No message shows a key. */
    static S3Address parse(String address) {
        String[] parts = address.substring("s3://".length()).split("\\?", 2);
        String host = parts[0].endsWith("/") ? parts[0].substring(0, parts[0].length() - 1) : parts[0];
        if (host.isEmpty() || host.contains("/")) {
            throw new IllegalArgumentException(
                    "S3 address is 's3://" + parts[0] + "', expected s3://bucket without a path");
        }
        Map<String, String> options = options(parts.length == 2 ? parts[1] : "");
        boolean isServerForm = options.keySet().stream().anyMatch(name -> name.startsWith("s3-"));
        return isServerForm ? ofServerForm(host, options) : ofBucketForm(host, options);
    }

    private static Map<String, String> options(String query) {
        Map<String, String> options = new LinkedHashMap<>();
        for (String pair : query.split("&")) {
            if (pair.isEmpty()) {
                continue;
            }
            String[] sides = pair.split("=", 2);
            String name = decode(sides[0]);
            String value = sides.length == 2 ? decode(sides[1]) : "";
            if (value.isEmpty() || options.put(name, value) != null) {
                throw new IllegalArgumentException(
                        "S3 address has the option '" + name + "' twice or empty, expected it once, with a value");
            }
        }
        return options;
    }

    private static S3Address ofServerForm(String server, Map<String, String> options) {
        String bucket = options.get("s3-data-bucket");
        if (bucket == null) {
            throw new IllegalArgumentException(
                    "S3 address names the server '" + server + "' but no bucket, expected s3-data-bucket");
        }
        Map<String, String> translated = new LinkedHashMap<>();
        translated.put("endpoint", options.getOrDefault("s3-endpoint-protocol", "https") + "://" + server);
        options.forEach((name, value) -> {
            if (SERVER_FORM.containsKey(name)) {
                translated.put(SERVER_FORM.get(name), value);
            } else if (!SERVER_ONLY.contains(name) && !IGNORED.contains(name)) {
                throw new IllegalArgumentException("S3 address has the unknown option '" + name + "'");
            }
        });
        return ofBucketForm(bucket, translated);
    }

    private static S3Address ofBucketForm(String bucket, Map<String, String> options) {
        for (String name : options.keySet()) {
            if (!BUCKET_FORM.contains(name)) {
                throw new IllegalArgumentException("S3 address has the unknown option '" + name + "', expected some of "
                        + BUCKET_FORM.stream().sorted().toList());
            }
        }
        if (options.containsKey("accessKey") != options.containsKey("secretKey")) {
            throw new IllegalArgumentException(
                    "S3 address has one of access key and secret key, expected both or none");
        }

        String endpoint = options.get("endpoint");
        if (endpoint != null && !endpoint.matches("https?://.+")) {
            throw new IllegalArgumentException(
                    "S3 endpoint is '" + endpoint + "', expected http://host:port or https://");
        }
        String pathStyle = options.getOrDefault("pathStyle", endpoint == null ? "false" : "true");
        if (!pathStyle.matches("true|false")) {
            throw new IllegalArgumentException("S3 path style is '" + pathStyle + "', expected true or false");
        }
        String checksum = options.getOrDefault("checksum", "md5");
        if (!checksum.matches("md5|crc32|crc32c")) {
            throw new IllegalArgumentException(
                    "S3 checksum is '" + checksum + "', expected one of md5, crc32, crc32c");
        }

        return new S3Address(
                bucket,
                Optional.ofNullable(endpoint).map(URI::create),
                options.getOrDefault("region", "us-east-1"),
                options.getOrDefault("accessKey", ""),
                options.getOrDefault("secretKey", ""),
                pathStyle.equals("true"),
                Checksum.valueOf(checksum.toUpperCase(java.util.Locale.ROOT)));
    }

    private static String decode(String text) {
        // A plus is literal in these addresses.
        return URLDecoder.decode(text.replace("+", "%2B"), StandardCharsets.UTF_8);
    }

    @Override
    public String toString() {
        return "s3://" + bucket + endpoint.map(uri -> " at " + uri.getHost() + ":" + uri.getPort()).orElse("");
    }
}
