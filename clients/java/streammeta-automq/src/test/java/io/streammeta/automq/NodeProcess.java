package io.streammeta.automq;

import static io.streammeta.automq.Node.get;

import com.automq.stream.s3.metadata.S3ObjectMetadata;
import com.automq.stream.s3.metadata.StreamMetadata;
import io.streammeta.store.ObjectKeys;
import io.streammeta.store.ObjectStore;
import java.nio.ByteBuffer;
import java.util.Arrays;
import java.util.Base64;
import java.util.List;
import java.util.Map;
import java.util.Scanner;
import java.util.function.Consumer;

/** A process with a stream, which appends each line that it reads: by s3stream if it is there, or else by the managers. */
final class NodeProcess {
    static final String UPLOAD = "upload";
    static final String READ = "read";
    static final String END = "end";
    static final String FAILED = "failed";
    static final int NODE_ID = 61;

    /** The stream of a process. */
    interface Log {
        long streamId();

        void append(byte[] message);

        void upload();

        void read(Consumer<byte[]> reader);
    }

    /** Opens a log. */
    interface Opener {
        /** Returns the stream, or a new one if its id is -1. */
        Log open(List<String> endpoints, String bucket, long streamId, long epoch);
    }

    private NodeProcess() {}

    /** Arguments: endpoints, separated by commas, the bucket, the id of the stream or -1, and its epoch. */
    public static void main(String[] arguments) throws Exception {
        Log log = opener().open(
                Arrays.asList(arguments[0].split(",")), arguments[1], Long.parseLong(arguments[2]), Long.parseLong(arguments[3]));
        System.out.println(log.streamId());
        for (Scanner input = new Scanner(System.in); input.hasNextLine(); ) {
            System.out.println(answer(log, input.nextLine()));
        }
    }

    private static Opener opener() throws ReflectiveOperationException {
        try {
            return (Opener) Class.forName("io.streammeta.automq.S3streamLog").getDeclaredConstructor().newInstance();
        } catch (ClassNotFoundException withoutS3stream) {
            return ManagersLog::new;
        }
    }

    private static String answer(Log log, String line) {
        try {
            switch (line) {
                case UPLOAD -> log.upload();
                case READ -> log.read(message -> System.out.println(Base64.getEncoder().encodeToString(message)));
                default -> log.append(Base64.getDecoder().decode(line));
            }
            return END;
        } catch (RuntimeException | AssertionError error) {
            error.printStackTrace();
            return FAILED;
        }
    }

    /** An object for each message, as s3stream commits them. */
    private static final class ManagersLog implements Log {
        private static final int LIMIT = 100;

        private final Node node;
        private final ObjectStore store;
        private final long streamId;

        ManagersLog(List<String> endpoints, String bucket, long streamId, long epoch) {
            node = Node.open(endpoints, NODE_ID);
            store = ObjectStore.open(bucket);
            for (StreamMetadata opened : get(node.streams().getOpeningStreams())) {
                get(node.streams().closeStream(opened.streamId(), opened.epoch())); // by the killed process
            }
            this.streamId = streamId >= 0 ? streamId : get(node.streams().createStream(Map.of()));
            get(node.streams().openStream(this.streamId, epoch, Map.of()));
        }

        @Override
        public long streamId() {
            return streamId;
        }

        @Override
        public void append(byte[] message) {
            long end = node.describe(streamId).endOffset();
            long objectId = node.prepare();
            store.put(key(objectId), ByteBuffer.wrap(message));
            get(node.objects().commitStreamSetObject(Node.upload(objectId, streamId, end, end + 1)));
        }

        private String key(long objectId) {
            return ObjectKeys.of(node.metadata().objectNamespace(), objectId);
        }

        @Override
        public void upload() {}

        @Override
        public void read(Consumer<byte[]> reader) {
            long end = node.describe(streamId).endOffset();
            for (long offset = 0; offset < end; offset += LIMIT) {
                long until = Math.min(end, offset + LIMIT);
                for (S3ObjectMetadata object : get(node.objects().getObjects(streamId, offset, until, LIMIT))) {
                    reader.accept(store.get(key(object.objectId())));
                }
            }
        }
    }
}
