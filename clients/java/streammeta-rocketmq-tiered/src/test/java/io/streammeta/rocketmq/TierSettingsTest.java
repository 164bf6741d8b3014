package io.streammeta.rocketmq;

import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNull;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;
import org.junit.jupiter.params.ParameterizedTest;
import org.junit.jupiter.params.provider.CsvSource;

/** The file of settings: the example is valid, and mistakes are named. */
class TierSettingsTest {
    private static final String REQUIRED = "controllers=a:1,b:2\nbucket=file:///tmp/b\nnode.id=7\n";

    @TempDir
    Path folder;

    @Test
    void theExampleIsValid() {
        TierSettings settings = TierSettings.read(Path.of("example/streammeta.properties"));
        assertEquals(List.of("127.0.0.1:9091", "127.0.0.1:9092", "127.0.0.1:9093"), settings.controllers());
        assertEquals(7, settings.nodeId());
        assertNull(settings.tls());
    }

    @Test
    void certificatesAreRead() throws IOException {
        TierSettings settings = read(REQUIRED + "tls.ca=ca.pem\ntls.certificate=b.pem\ntls.key=b.key\n");
        assertEquals(Path.of("b.key"), settings.tls().key());
    }

    @ParameterizedTest
    @CsvSource({
        "bucket=file:///tmp/b, 'lacks [controllers, node.id]'",
        "tls.ca=ca.pem, 'lacks [bucket, controllers, node.id, tls.certificate, tls.key]'",
        "node.id=seven, lacks",
        "nodeid=7, unknown settings [nodeid]",
    })
    void mistakesAreNamed(String line, String expected) {
        IllegalArgumentException error = assertThrows(IllegalArgumentException.class, () -> read(line + "\n"));
        assertTrue(error.getMessage().contains(expected), error.getMessage());
    }

    @Test
    void theNodeIsANumber() {
        assertThrows(IllegalArgumentException.class, () -> read(REQUIRED.replace("7", "seven")));
    }

    @Test
    void aMissingFileIsNamed() {
        IllegalArgumentException error =
                assertThrows(IllegalArgumentException.class, () -> TierSettings.read(folder.resolve("absent")));
        assertTrue(error.getMessage().contains("tieredStoreFilePath"), error.getMessage());
    }

    private TierSettings read(String content) throws IOException {
        return TierSettings.read(Files.writeString(folder.resolve("streammeta.properties"), content));
    }
}
