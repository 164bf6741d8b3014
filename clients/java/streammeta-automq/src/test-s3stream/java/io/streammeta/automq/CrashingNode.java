package io.streammeta.automq;

import com.automq.stream.api.Stream;
import java.io.IOException;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.stream.Collectors;

/**
 * A process that appends to streams, uploads a part, acknowledges the rest in its write-ahead log alone, and halts as by
 * {@code kill -9}.
 */
final class CrashingNode {
    static final int STREAMS = 4;
    static final int UPLOADED = 1000;
    static final int ACKNOWLEDGED = 2000;

    private CrashingNode() {}

    /** Arguments: endpoints, separated by commas, the bucket, and the id of the node. */
    public static void main(String[] arguments) {
        S3streamNode node = S3streamNode.open(
                Arrays.asList(arguments[0].split(",")), S3streamNode.directory(Path.of(arguments[1])), Integer.parseInt(arguments[2]));
        List<Stream> streams = new ArrayList<>();
        for (int row = 0; row < STREAMS; row++) {
            Stream stream = node.create();
            Batches.appendAll(stream, 0, UPLOADED);
            node.upload(stream);
            streams.add(stream);
        }
        streams.forEach(stream -> Batches.appendAll(stream, UPLOADED, ACKNOWLEDGED));
        System.out.println("ids " + streams.stream()
                .map(stream -> Long.toString(stream.streamId()))
                .collect(Collectors.joining(",")));
        System.out.flush();
        Runtime.getRuntime().halt(137);
    }

    /** Runs the process to its end, and returns the ids of its streams. */
    static List<Long> run(List<String> endpoints, Path bucket, int nodeId) throws IOException, InterruptedException {
        Process process = new ProcessBuilder(
                        Path.of(System.getProperty("java.home"), "bin", "java").toString(),
                        "-Xmx256m",
                        "-Dio.netty.tryReflectionSetAccessible=true",
                        "-cp",
                        System.getProperty("surefire.test.class.path", System.getProperty("java.class.path")),
                        CrashingNode.class.getName(),
                        String.join(",", endpoints),
                        bucket.toString(),
                        Integer.toString(nodeId))
                .redirectError(ProcessBuilder.Redirect.INHERIT)
                .start();
        String output = new String(process.getInputStream().readAllBytes());
        if (process.waitFor() != 137) {
            throw new IOException("the process ended otherwise: " + output);
        }
        return Arrays.stream(output.substring(output.indexOf("ids ") + 4).strip().split(","))
                .map(Long::valueOf)
                .toList();
    }
}
