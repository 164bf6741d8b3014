package io.streammeta.store;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.testkit.Bucket;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.stream.IntStream;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

/** The contract of all stores, held against an S3 server. */
class S3ObjectStoreTest extends ObjectStoreTest {
    @RegisterExtension
    static final Bucket BUCKET = new Bucket();

    @Override
    ObjectStore open() {
        return ObjectStore.open(BUCKET.address());
    }

    @ParameterizedTest
    @ValueSource(strings = {"md5", "crc32", "crc32c"})
    void everyChecksumIsAccepted(String checksum) {
        try (ObjectStore store = ObjectStore.open(BUCKET.address() + "&checksum=" + checksum)) {
            store.put("checksums/" + checksum, ByteBuffer.wrap(new byte[] {1, 2, 3}));
            assertEquals(3, store.get("checksums/" + checksum).length);
        }
    }

    @Test
    void manyKeysAreListedAndDeletedInBatches() {
        try (ObjectStore store = open()) {
            List<String> keys =
                    IntStream.range(0, 1100).mapToObj(number -> "many/" + number).toList();
            keys.forEach(key -> store.put(key, ByteBuffer.allocate(1)));
            assertEquals(1100, store.list("many/").count());
            assertEquals(1100, store.delete(keys).requireAll().deleted().size());
            assertEquals(0, store.list("many/").count());
        }
    }

    @Test
    void aMissingBucketIsNamed() {
        try (ObjectStore store = ObjectStore.open(BUCKET.address().replace("s3://bucket?", "s3://absent?"))) {
            var error = assertThrows(BucketNotFoundException.class, store::check);
            assertTrue(error.getMessage().contains("'absent'"), error.getMessage());
            assertThrows(BucketNotFoundException.class, () -> store.get("key"));
        }
    }

    @Test
    void aServerThatIsGoneMayPass() {
        String address = "s3://bucket?endpoint=http%3A%2F%2F127.0.0.1%3A1&accessKey=test&secretKey=test";
        try (ObjectStore store = ObjectStore.open(address)) {
            var error = assertThrows(
                    StoreUnavailableException.class, () -> store.putIfAbsent("key", ByteBuffer.allocate(1)));
            assertTrue(error.mayPass());
        }
    }
}
