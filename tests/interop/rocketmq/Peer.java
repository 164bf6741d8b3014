import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.List;
import java.util.Set;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.MessageStoreExecutor;
import org.apache.rocketmq.tieredstore.common.AppendResult;
import org.apache.rocketmq.tieredstore.file.FlatFileStore;
import org.apache.rocketmq.tieredstore.file.FlatMessageFile;
import org.apache.rocketmq.tieredstore.index.IndexItem;
import org.apache.rocketmq.tieredstore.index.IndexStoreService;
import org.apache.rocketmq.tieredstore.metadata.DefaultMetadataStore;
import org.apache.rocketmq.tieredstore.util.MessageStoreUtil;

/**
 * RocketMQ's released classes over a directory. Lines of the script file, one answer each:
 * "read TOPIC QUEUE", "time TOPIC QUEUE MS LOWER|UPPER", "key TOPIC KEY", "write TOPIC QUEUE FILE"
 * (FILE: a line "TAGS_CODE STORED_MS KEY HEX" for each message), "upload".
 */
public final class Peer {
    private static FlatFileStore store;
    private static IndexStoreService index;
    private static String broker;

    public static void main(String[] args) throws Exception {
        Path root = Path.of(args[0]);
        broker = args[2];
        MessageStoreConfig config = new MessageStoreConfig();
        config.setBrokerClusterName(args[1]);
        config.setBrokerName(broker);
        config.setStorePathRootDir(root.toString());
        config.setTieredStoreFilePath(root.resolve("files").toString());
        config.setTieredBackendServiceProvider(
                "org.apache.rocketmq.tieredstore.provider.PosixFileSegment");
        config.setTieredStoreCommitLogMaxSize(4000);
        config.setTieredStoreConsumeQueueMaxSize(1000);
        config.setTieredStoreFileReservedTime(1_000_000);
        config.setTieredStoreIndexFileMaxHashSlotNum(50);
        config.setTieredStoreIndexFileMaxIndexNum(500);
        DefaultMetadataStore metadata = new DefaultMetadataStore(config);
        store = new FlatFileStore(config, metadata, new MessageStoreExecutor());
        if (!store.load()) {
            throw new IllegalStateException("store can't be loaded");
        }
        index = new IndexStoreService(
                store.getFlatFileFactory(), MessageStoreUtil.getIndexFilePath(broker));
        index.start();
        for (String line : Files.readAllLines(Path.of(args[3]))) {
            System.out.println(answer(line.split(" ")));
        }
        System.out.flush();
        System.exit(0);
    }

    private static String answer(String[] words) throws Exception {
        switch (words[0]) {
            case "read":
                return read(file(words[1], words[2]));
            case "time":
                return Long.toString(file(words[1], words[2])
                        .getQueueOffsetByTimeAsync(
                                Long.parseLong(words[3]), BoundaryType.valueOf(words[4]))
                        .get());
            case "key":
                return key(words[1], words[2]);
            case "write":
                return write(file(words[1], words[2]), words);
            default:
                index.forceUpload();
                return "uploaded";
        }
    }

    private static FlatMessageFile file(String topic, String queue) {
        return store.computeIfAbsent(new MessageQueue(topic, broker, Integer.parseInt(queue)));
    }

    private static String read(FlatMessageFile file) throws Exception {
        StringBuilder found = new StringBuilder();
        for (long at = file.getConsumeQueueMinOffset(); at < file.getConsumeQueueCommitOffset(); at++) {
            ByteBuffer data = file.getMessageAsync(at).get();
            byte[] bytes = new byte[data.remaining()];
            data.get(bytes);
            found.append(found.length() > 0 ? " " : "").append(HexFormat.of().formatHex(bytes));
        }
        return found.toString();
    }

    private static String key(String topic, String key) throws Exception {
        StringBuilder found = new StringBuilder();
        List<IndexItem> items = index.queryAsync(topic, key, 1000, 0, Long.MAX_VALUE).get();
        items.stream().mapToLong(IndexItem::getOffset).sorted().forEach(
                at -> found.append(found.length() > 0 ? " " : "").append(at));
        return found.toString();
    }

    private static void check(AppendResult result) {
        if (result != AppendResult.SUCCESS) {
            throw new IllegalStateException(result.toString());
        }
    }

    private static String write(FlatMessageFile file, String[] words) throws Exception {
        if (!file.isFlatFileInit()) {
            file.initOffset(0);
        }
        long queueOffset = file.getConsumeQueueMaxOffset();
        for (String line : Files.readAllLines(Path.of(words[3]))) {
            String[] parts = line.split(" ");
            byte[] data = HexFormat.of().parseHex(parts[3]);
            long stored = Long.parseLong(parts[1]);
            ByteBuffer buffer = ByteBuffer.wrap(data);
            check(file.appendCommitLog(buffer));
            long place = file.getCommitLogMaxOffset() - data.length;
            DispatchRequest request = new DispatchRequest(words[1], Integer.parseInt(words[2]),
                    place, data.length, Long.parseLong(parts[0]), stored, queueOffset++,
                    parts[2], null, 0, 0, null);
            check(file.appendConsumeQueue(request));
            index.putKey(words[1], (int) file.getTopicId(), Integer.parseInt(words[2]),
                    Set.of(parts[2]), place, data.length, stored);
        }
        boolean done = file.commitAsync().get();
        file.flushMetadata();
        return Boolean.toString(done);
    }
}
