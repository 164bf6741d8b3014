package io.streammeta.example;

import static org.junit.jupiter.api.Assertions.assertDoesNotThrow;

import io.streammeta.testkit.Controllers;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class ExampleTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    @Test
    void theExampleRuns() {
        String[] arguments = {CONTROLLERS.endpoints().get(0), CONTROLLERS.bucket()};
        assertDoesNotThrow(() -> Example.main(arguments));
    }
}
