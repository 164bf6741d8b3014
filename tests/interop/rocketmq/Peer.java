import java.lang.reflect.Field;
import java.lang.reflect.Proxy;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HexFormat;
import java.util.List;
import java.util.Set;
import java.util.concurrent.ThreadPoolExecutor;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.plugin.AbstractPluginMessageStore;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.MessageStoreExecutor;
import org.apache.rocketmq.tieredstore.TieredMessageStore;
import org.apache.rocketmq.tieredstore.common.AppendResult;
import org.apache.rocketmq.tieredstore.core.MessageStoreFetcherImpl;
import org.apache.rocketmq.tieredstore.core.MessageStoreTopicFilter;
import org.apache.rocketmq.tieredstore.file.FlatFileStore;
import org.apache.rocketmq.tieredstore.file.FlatMessageFile;
import org.apache.rocketmq.tieredstore.index.IndexItem;
import org.apache.rocketmq.tieredstore.index.IndexStoreService;
import org.apache.rocketmq.tieredstore.metadata.DefaultMetadataStore;
import org.apache.rocketmq.tieredstore.util.MessageStoreUtil;
import sun.misc.Unsafe;

/**
 * RocketMQ's released classes over a directory. Lines of the script file, one answer each:
 * "read TOPIC QUEUE", "time TOPIC QUEUE MS LOWER|UPPER", "key TOPIC KEY", "write TOPIC QUEUE FILE"
 * (FILE: a line "TAGS_CODE STORED_MS KEY HEX" for each message), "upload"; and by the fetcher:
 * "fetch TOPIC QUEUE OFFSET COUNT" (status, next offset, messages), "query TOPIC KEY" (messages).
 */
public final class Peer {
    private static FlatFileStore store;
    private static IndexStoreService index;
    private static MessageStoreFetcherImpl fetcher;
    private static String broker;

    public static void main(String[] args) {
        try {
            run(args);
        } catch (Throwable error) { // the store's threads would keep the process alive
            error.printStackTrace();
            System.exit(1);
        }
        System.out.flush();
        System.exit(0);
    }

    private static void run(String[] args) throws Exception {
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
        MessageStoreExecutor executor = oneReader();
        store = new FlatFileStore(config, metadata, executor);
        if (!store.load()) {
            throw new IllegalStateException("store can't be loaded");
        }
        index = new IndexStoreService(
                store.getFlatFileFactory(), MessageStoreUtil.getIndexFilePath(broker));
        index.start();
        fetcher = new MessageStoreFetcherImpl(plugIn(executor, config), config, store, index);
        for (String line : Files.readAllLines(Path.of(args[3]))) {
            System.out.println(answer(line.split(" ")));
        }
    }

    /** Files are read by one thread: PosixFileSegment sets a shared position, then reads from it. */
    private static MessageStoreExecutor oneReader() {
        MessageStoreExecutor executor = new MessageStoreExecutor();
        ThreadPoolExecutor readers = (ThreadPoolExecutor) executor.bufferFetchExecutor;
        readers.setCorePoolSize(1);
        readers.setMaximumPoolSize(1);
        return executor;
    }

    /** The plug-in store needs a broker; the fetcher wants what is set here. */
    private static TieredMessageStore plugIn(
            MessageStoreExecutor executor, MessageStoreConfig config) throws Exception {
        Field field = Unsafe.class.getDeclaredField("theUnsafe");
        field.setAccessible(true);
        Unsafe unsafe = (Unsafe) field.get(null);
        Object made = unsafe.allocateInstance(TieredMessageStore.class);
        Field threads = TieredMessageStore.class.getDeclaredField("storeExecutor");
        unsafe.putObject(made, unsafe.objectFieldOffset(threads), executor);
        Field filter = TieredMessageStore.class.getDeclaredField("topicFilter");
        unsafe.putObject(
                made, unsafe.objectFieldOffset(filter), new MessageStoreTopicFilter(config));
        var limits = new org.apache.rocketmq.store.config.MessageStoreConfig();
        Object local = Proxy.newProxyInstance(
                Peer.class.getClassLoader(), new Class<?>[] {MessageStore.class},
                (proxy, method, words) -> {
                    if (method.getName().equals("getMessageStoreConfig")) {
                        return limits;
                    }
                    throw new UnsupportedOperationException(method.getName());
                });
        Field next = AbstractPluginMessageStore.class.getDeclaredField("next");
        unsafe.putObject(made, unsafe.objectFieldOffset(next), local);
        return (TieredMessageStore) made;
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
            case "fetch":
                return fetch(words[1], Integer.parseInt(words[2]), Long.parseLong(words[3]),
                        Integer.parseInt(words[4]));
            case "query":
                return hex(fetcher.queryMessageAsync(words[1], words[2], 1000, 0, Long.MAX_VALUE)
                        .get().getMessageBufferList());
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

    private static String fetch(String topic, int queue, long offset, int count)
            throws Exception {
        GetMessageResult found = fetcher.getMessageAsync("g", topic, queue, offset, count, null)
                .get();
        String head = found.getStatus() + " " + found.getNextBeginOffset() + " ";
        return head + hex(found.getMessageBufferList());
    }

    private static String hex(List<ByteBuffer> messages) {
        StringBuilder found = new StringBuilder();
        for (ByteBuffer data : messages) {
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
