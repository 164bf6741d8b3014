package io.streammeta.automq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;

import io.streammeta.client.TlsFiles;
import java.nio.file.Path;
import java.util.List;
import java.util.Optional;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.ValueSource;

class ElasticStreamEndpointTest {
    @Test
    void controllersInPlainText() {
        ElasticStreamEndpoint endpoint = ElasticStreamEndpoint.parse("streammeta://a:1,10.0.0.2:2");
        assertEquals(new ElasticStreamEndpoint(List.of("a:1", "10.0.0.2:2"), Optional.empty()), endpoint);
    }

    @Test
    void filesOfTls() {
        TlsFiles files = new TlsFiles(Path.of("/k/ca.pem"), Path.of("/k/b.pem"), Path.of("/k/b.key"));
        ElasticStreamEndpoint endpoint =
                ElasticStreamEndpoint.parse("streammeta://a:1?ca=/k/ca.pem&certificate=/k/b.pem&key=/k/b.key");
        assertEquals(new ElasticStreamEndpoint(List.of("a:1"), Optional.of(files)), endpoint);
    }

    @ParameterizedTest
    @ValueSource(strings = {"s3://", "streammeta:", "streammeta://", "streammeta://a:1?ca=/k/ca.pem",
        "streammeta://a:1?ca=a&certificate=b&key=c&password=d"})
    void otherForms(String value) {
        assertThrows(IllegalArgumentException.class, () -> ElasticStreamEndpoint.parse(value));
    }
}
