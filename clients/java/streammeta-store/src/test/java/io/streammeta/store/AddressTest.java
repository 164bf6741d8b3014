package io.streammeta.store;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;
import org.junit.jupiter.params.provider.ValueSource;

class AddressTest {
    @Test
    void bothFormsNameTheSameBucket() {
        S3Address one = S3Address.parse(
                "s3://data?endpoint=http%3A%2F%2F127.0.0.1%3A9000&accessKey=a%2Bb&secretKey=c+d&region=eu");
        S3Address other = S3Address.parse("s3://127.0.0.1:9000?s3-data-bucket=data&s3-endpoint-protocol=http"
                + "&s3-access-key=a+b&s3-secret-key=c+d&s3-region=eu&cluster-id=x&s3-ops-bucket=y");

        assertEquals(one, other);
        assertEquals("a+b", one.accessKey());
        assertTrue(one.isPathStyle());
        assertFalse(S3Address.parse("s3://data").isPathStyle());
        assertFalse(one.toString().contains("c+d"), "an address shows its secret key");
    }

    @ParameterizedTest
    @ValueSource(
            strings = {
                "s3://bucket/path",
                "s3://",
                "s3://bucket?nonsense=1",
                "s3://bucket?region=",
                "s3://bucket?region=a&region=b",
                "s3://bucket?accessKey=a",
                "s3://bucket?endpoint=ftp://x",
                "s3://bucket?pathStyle=maybe",
                "s3://bucket?checksum=sha1",
                "s3://host:1?s3-region=a",
                "file://relative",
                "file:///folder?option=1",
                "http://bucket"
            })
    void anInvalidAddressIsRejected(String address) {
        assertThrows(IllegalArgumentException.class, () -> ObjectStore.open(address));
    }

    @ParameterizedTest
    @CsvSource({
        "0, 00000000/_streammeta_demo/0",
        "78, e4000000/_streammeta_demo/78",
        "4294967296, 000000001/_streammeta_demo/4294967296"
    })
    void objectKeysAreThoseOfTheFormat(long objectId, String key) {
        assertEquals(key, ObjectKeys.of("_streammeta_demo", objectId));
    }
}
