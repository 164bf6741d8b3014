package io.streammeta.testkit;

import java.io.IOException;
import java.util.List;
import org.junit.jupiter.api.extension.BeforeAllCallback;
import org.junit.jupiter.api.extension.ExtensionContext;

/** An S3 server with one bucket for the tests of a class. Register it as a static field, as {@link Controllers}. */
public final class Bucket implements BeforeAllCallback, AutoCloseable {
    private PythonProgram program;
    private String address;

    @Override
    public void beforeAll(ExtensionContext context) throws IOException {
        program = new PythonProgram("bucket.py", List.of());
        address = program.readLine();
        context.getStore(ExtensionContext.Namespace.create(Bucket.class)).put(this, this);
    }

    /** Returns the address of the bucket, as the store opens it. */
    public String address() {
        return address;
    }

    @Override
    public void close() throws IOException {
        program.close();
    }
}
