package io.streammeta.testkit;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.List;

/** Class path of a released broker, with the broker's own dependencies. */
public final class ReleasedBroker {
    private ReleasedBroker() {}

    /**
     * Resolves a class path with Maven, first from the local repository alone.
     *
     * @param pom the file that names the broker's artifacts
     * @param version the property of the version in it and its value, such as {@code "kafka.version=4.4.0"}
     * @param folder where Maven's log goes
     */
    public static String classPath(Path pom, String version, Path folder) {
        Path output = folder.resolve("class-path");
        List<String> command = List.of(
                "mvn", "-q", "-B", "-f", pom.toString(), "dependency:build-classpath",
                "-Dmdep.outputFile=" + output, "-D" + version);
        List<String> offline = new ArrayList<>(command);
        offline.add("-o");
        Path log = folder.resolve("maven.log");
        try {
            if (run(offline, log) != 0 && run(command, log) != 0) {
                throw new IllegalStateException("Maven can't resolve " + version + ": " + Files.readString(log));
            }
            return Files.readString(output).trim();
        } catch (IOException | InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    private static int run(List<String> command, Path log) throws IOException, InterruptedException {
        return new ProcessBuilder(command)
                .redirectErrorStream(true)
                .redirectOutput(log.toFile())
                .start()
                .waitFor();
    }
}
