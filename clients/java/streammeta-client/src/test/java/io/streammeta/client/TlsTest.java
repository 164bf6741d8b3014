package io.streammeta.client;

import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.errors.ControllerUnavailableException;
import io.streammeta.client.errors.PermissionDeniedException;
import io.streammeta.testkit.Controllers;
import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.time.Duration;
import java.util.Map;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.junit.jupiter.api.io.TempDir;

class TlsTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.overTls();

    @TempDir
    Path folder;

    @Test
    void aBrokerSpeaksForItsOwnNodeAlone() {
        try (StreammetaClient client = connect(files("broker-1"))) {
            long epoch = System.currentTimeMillis();
            try (BrokerSession session =
                    await(client.openSession(new NodeIdentity(1, epoch), SessionOptions.DEFAULT))) {
                assertTrue(await(session.streams().create(Map.of())) >= 0);
            }
            var error = assertThrows(
                    PermissionDeniedException.class,
                    () -> await(client.openSession(new NodeIdentity(2, epoch), SessionOptions.DEFAULT)));
            assertEquals("NOT_YOUR_NODE", error.reason());
        }
    }

    @Test
    void replacedFilesAreUsed() throws IOException, InterruptedException {
        copy("broker-1");
        TlsFiles files = new TlsFiles(
                CONTROLLERS.certificate("ca.pem"), folder.resolve("own.pem"), folder.resolve("own.key"));
        try (StreammetaClient client = connect(files)) {
            long epoch = System.currentTimeMillis();
            NodeIdentity second = new NodeIdentity(2, epoch);
            assertThrows(
                    PermissionDeniedException.class, () -> await(client.openSession(second, SessionOptions.DEFAULT)));

            copy("broker-2");
            Thread.sleep(1100); // the files are looked at once a second
            await(client.openSession(second, SessionOptions.DEFAULT)).close();
        }
    }

    @Test
    void plainTextIsNotAnswered() {
        StreammetaClient.Builder builder = StreammetaClient.builder()
                .endpoints(CONTROLLERS.endpoints())
                .deadline(Duration.ofMillis(500));
        try (StreammetaClient client = builder.build()) {
            var error = assertThrows(ControllerUnavailableException.class, () -> await(client.describeCluster()));
            assertTrue(error.isRetriable());
            assertTrue(CONTROLLERS.endpoints().containsAll(error.tried().keySet()));
        }
    }

    private void copy(String principal) throws IOException {
        for (String kind : new String[] {".pem", ".key"}) {
            Files.copy(
                    CONTROLLERS.certificate(principal + kind),
                    folder.resolve("own" + kind),
                    StandardCopyOption.REPLACE_EXISTING);
        }
    }

    private static TlsFiles files(String principal) {
        return new TlsFiles(
                CONTROLLERS.certificate("ca.pem"),
                CONTROLLERS.certificate(principal + ".pem"),
                CONTROLLERS.certificate(principal + ".key"));
    }

    private static StreammetaClient connect(TlsFiles files) {
        return StreammetaClient.builder()
                .endpoints(CONTROLLERS.endpoints())
                .tls(files)
                .build();
    }
}
