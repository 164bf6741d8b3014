package io.streammeta.automq;

import io.streammeta.testkit.FaultRun;
import io.streammeta.testkit.FaultyBroker;
import io.streammeta.testkit.Waiting;
import java.io.BufferedReader;
import java.io.IOException;
import java.io.PrintWriter;
import java.nio.file.Path;
import java.util.Base64;
import java.util.function.Predicate;
import org.junit.jupiter.api.Test;

/** A node in a process of its own, in a fault run. */
class FaultRunTest {
    @Test
    void serve() throws Exception {
        FaultRun.serve("automq", Broker::new);
    }

    private static final class Broker implements FaultyBroker {
        private final FaultRun.World world;
        private String streamId = "-1";
        private int epoch;
        private Process process;
        private BufferedReader output;
        private PrintWriter input;

        Broker(FaultRun.World world) throws Exception {
            this.world = world;
            start();
        }

        @Override
        public void kill() {
            process.destroyForcibly().onExit().join();
        }

        /** Starts it again if it ends, as a supervisor does: it ends without controllers. */
        @Override
        public void start() throws Exception {
            Waiting.until("the node starts", () -> {
                launch();
                return true;
            });
        }

        private void launch() throws IOException {
            process = new ProcessBuilder(
                            Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                            "-Xmx384m",
                            "-XX:TieredStopAtLevel=1", // starts with less of the processor
                            "-Dio.netty.tryReflectionSetAccessible=true",
                            "-cp",
                            System.getProperty("surefire.test.class.path", System.getProperty("java.class.path")),
                            NodeProcess.class.getName(),
                            world.endpoints(),
                            world.bucket(),
                            streamId,
                            Integer.toString(++epoch))
                    .redirectError(ProcessBuilder.Redirect.appendTo(world.folder().resolve("node.log").toFile()))
                    .start();
            output = process.inputReader();
            input = new PrintWriter(process.outputWriter(), true);
            streamId = readLine();
        }

        private String ask(String line) throws IOException {
            input.println(line);
            return readLine();
        }

        private String readLine() throws IOException {
            String line = output.readLine();
            if (line == null || line.equals(NodeProcess.FAILED)) {
                throw new IOException(line == null ? "the node has ended" : "the node failed, see its log");
            }
            return line;
        }

        @Override
        public void write(byte[] message) throws Exception {
            ask(Base64.getEncoder().encodeToString(message));
        }

        /** Uploads what is in the write-ahead log alone, and starts with cold caches. */
        @Override
        public void settle() throws Exception {
            ask(NodeProcess.UPLOAD);
            kill();
            start();
        }

        @Override
        public void read(Predicate<byte[]> reader) throws Exception {
            String line = ask(NodeProcess.READ);
            while (!line.equals(NodeProcess.END)) {
                reader.test(Base64.getDecoder().decode(line));
                line = readLine();
            }
        }

        @Override
        public void close() {
            kill();
        }
    }
}
