package io.streammeta.testkit;

import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import java.util.stream.IntStream;
import org.junit.jupiter.api.extension.BeforeAllCallback;
import org.junit.jupiter.api.extension.ExtensionContext;

/**
 * Three real controllers for the tests of a class, started once for it. Register it as a static field:
 *
 * <pre>{@code
 * @RegisterExtension
 * static final Controllers CONTROLLERS = Controllers.inPlainText();
 * }</pre>
 *
 * <p>They run in the repository's {@code .venv}, over a directory as their bucket, and end with this process.
 */
public final class Controllers implements BeforeAllCallback, AutoCloseable {
    /** Failures are seen soon, so that tests take seconds. */
    private static final List<String> OPTIONS =
            List.of("--election-timeout-ms", "400", "--fetch-timeout-ms", "1500", "--lifecycle-interval-ms", "50",
                    "--delete-delay-ms", "200");

    private final boolean hasTls;
    private final List<Relay> relays;
    private PythonProgram program;
    private List<String> endpoints = List.of();

    private Controllers(boolean hasTls, List<Relay> relays) {
        this.hasTls = hasTls;
        this.relays = relays;
    }

    /** Returns controllers in plain text. */
    public static Controllers inPlainText() {
        return new Controllers(false, List.of());
    }

    /** Returns controllers over TLS, with certificates for brokers 1 to 4 and an administrator. */
    public static Controllers overTls() {
        return new Controllers(true, List.of());
    }

    /** Returns controllers in plain text, each behind a relay that can break its connections. */
    public static Controllers behindRelays() {
        return new Controllers(false, IntStream.range(0, 3).mapToObj(index -> new Relay()).toList());
    }

    @Override
    public void beforeAll(ExtensionContext context) throws IOException {
        start();
        context.getStore(ExtensionContext.Namespace.create(Controllers.class)).put(this, this);
    }

    private void start() throws IOException {
        List<String> arguments = new ArrayList<>(List.of(hasTls ? "tls" : "plain"));
        arguments.addAll(OPTIONS);
        arguments.add("--");
        relays.forEach(relay -> arguments.add(relay.endpoint()));
        program = new PythonProgram("cluster.py", arguments);

        List<String> own = new ArrayList<>();
        Matcher matcher = Pattern.compile("\"(127\\.0\\.0\\.1:[0-9]+)\"").matcher(program.readLine());
        while (matcher.find()) {
            own.add(matcher.group(1));
        }
        for (int index = 0; index < relays.size(); index++) {
            relays.get(index).forwardTo(own.get(index));
        }
        endpoints = relays.isEmpty() ? own : relays.stream().map(Relay::endpoint).toList();
    }

    /** Returns the addresses for clients, those of the relays if there are any. */
    public List<String> endpoints() {
        return endpoints;
    }

    /** Returns the relays, in the order of the controllers. */
    public List<Relay> relays() {
        return relays;
    }

    /** Returns the address of the bucket, such as {@code file:///tmp/bucket}. */
    public String bucket() {
        return "file://" + program.folder().resolve("bucket");
    }

    /** Returns the folder with the logs of the controllers and, over TLS, the certificates. */
    public Path folder() {
        return program.folder();
    }

    /** Returns a file of the certificates, such as {@code "broker-1.pem"}, {@code "broker-1.key"} or {@code "ca.pem"}. */
    public Path certificate(String name) {
        return program.folder().resolve("certificates").resolve(name);
    }

    /** Kills a controller, 1 to 3, as {@code kill -9} does. */
    public void kill(int nodeId) {
        obey("kill", nodeId);
    }

    /** Starts a controller that was killed. */
    public void start(int nodeId) {
        obey("start", nodeId);
    }

    /** Stops a controller with SIGSTOP. */
    public void pause(int nodeId) {
        obey("pause", nodeId);
    }

    /** Continues a controller that was paused. */
    public void resume(int nodeId) {
        obey("resume", nodeId);
    }

    private void obey(String command, int nodeId) {
        program.writeLine(command + " " + nodeId);
        program.readLine();
    }

    /** Ends the controllers and deletes their folder. */
    @Override
    public void close() throws IOException {
        relays.forEach(Relay::close);
        program.close();
    }
}
