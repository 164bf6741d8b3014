package io.streammeta.testkit;

import java.io.BufferedReader;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.io.Writer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.List;
import java.util.stream.Stream;

/** A program of this module's resources in the repository's {@code .venv}, which ends with its standard input. */
final class PythonProgram implements AutoCloseable {
    private final Path folder;
    private final Process process;
    private final BufferedReader output;
    private final Writer input;

    /** Starts a program, with a new folder as its first argument if there are others. */
    PythonProgram(String name, List<String> arguments) throws IOException {
        folder = Files.createTempDirectory("streammeta-java-").toRealPath();
        Path repository = Path.of(System.getProperty("streammeta.repository", "../../..")).toRealPath();
        Path script = folder.resolve(name);
        try (var resource = PythonProgram.class.getResourceAsStream(name)) {
            Files.copy(resource, script);
        }
        List<String> command = new ArrayList<>(
                List.of(repository.resolve(".venv/bin/python").toString(), "-P", script.toString()));
        if (!arguments.isEmpty()) {
            command.add(folder.toString());
            command.addAll(arguments);
        }
        process = new ProcessBuilder(command).redirectError(log().toFile()).start();
        output = new BufferedReader(new InputStreamReader(process.getInputStream(), StandardCharsets.UTF_8));
        input = process.outputWriter(StandardCharsets.UTF_8);
    }

    Path folder() {
        return folder;
    }

    /** Returns the next line that the program prints. */
    String readLine() {
        try {
            String line = output.readLine();
            if (line == null) {
                throw new IllegalStateException("the program has ended: " + Files.readString(log()));
            }
            return line;
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    void writeLine(String line) {
        try {
            input.write(line + "\n");
            input.flush();
        } catch (IOException error) {
            throw new UncheckedIOException(error);
        }
    }

    /** Ends the program and deletes its folder. */
    @Override
    public void close() throws IOException {
        input.close();
        process.onExit().join();
        try (Stream<Path> files = Files.walk(folder)) {
            for (Path file : files.sorted(Comparator.reverseOrder()).toList()) {
                Files.deleteIfExists(file);
            }
        }
    }

    private Path log() {
        return folder.resolve("program.log");
    }
}
