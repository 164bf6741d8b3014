package io.streammeta.store;

import io.streammeta.store.S3Address.Checksum;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.security.MessageDigest;
import java.security.NoSuchAlgorithmException;
import java.util.Base64;
import java.util.zip.CRC32;
import java.util.zip.CRC32C;

/** Checksums in base64, as S3 writes them. */
final class Digests {
    private static final int CHUNK = 64 * 1024;

    private Digests() {}

    static String of(Checksum kind, ByteBuffer data) {
        Sum sum = Sum.of(kind);
        sum.add(data.duplicate());
        return sum.base64();
    }

    static String of(Checksum kind, InputStream data) throws IOException {
        Sum sum = Sum.of(kind);
        byte[] chunk = new byte[CHUNK];
        for (int count = data.read(chunk); count >= 0; count = data.read(chunk)) {
            sum.add(ByteBuffer.wrap(chunk, 0, count));
        }
        return sum.base64();
    }

    /** A checksum of the bytes that were added so far. */
    private interface Sum {
        void add(ByteBuffer data);

        String base64();

        static Sum of(Checksum kind) {
            return switch (kind) {
                case MD5 -> md5();
                case CRC32 -> crc(new CRC32());
                case CRC32C -> crc(new CRC32C());
            };
        }

        private static Sum md5() {
            try {
                MessageDigest digest = MessageDigest.getInstance("MD5");
                return new Sum() {
                    @Override
                    public void add(ByteBuffer data) {
                        digest.update(data);
                    }

                    @Override
                    public String base64() {
                        return Base64.getEncoder().encodeToString(digest.digest());
                    }
                };
            } catch (NoSuchAlgorithmException error) {
                throw new IllegalStateException("this Java has no MD5", error);
            }
        }

        private static Sum crc(java.util.zip.Checksum checksum) {
            return new Sum() {
                @Override
                public void add(ByteBuffer data) {
                    checksum.update(data);
                }

                @Override
                public String base64() {
                    byte[] bytes = ByteBuffer.allocate(4).putInt((int) checksum.getValue()).array();
                    return Base64.getEncoder().encodeToString(bytes);
                }
            };
        }
    }
}
