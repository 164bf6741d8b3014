package io.streammeta.store;

import java.nio.charset.StandardCharsets;

/** The rules for keys and ranges that all stores follow. */
final class Keys {
    private static final int BYTES_MAX = 1024;

    private Keys() {}

    static void check(String key) {
        int size = key.getBytes(StandardCharsets.UTF_8).length;
        if (size < 1 || size > BYTES_MAX) {
            throw new InvalidKeyException(key, "it has " + size + " bytes, expected 1 to " + BYTES_MAX);
        }
    }

    static void checkRange(long start, long end) {
        if (start < 0 || end <= start) {
            throw new IllegalArgumentException(
                    "byte range is [" + start + ", " + end + "), expected 0 <= start < end");
        }
    }
}
