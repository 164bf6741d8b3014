import io.netty.buffer.Unpooled;
import java.lang.reflect.Proxy;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HexFormat;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import org.apache.bookkeeper.client.LedgerMetadataBuilder;
import org.apache.bookkeeper.client.api.DigestType;
import org.apache.bookkeeper.client.api.LedgerEntries;
import org.apache.bookkeeper.client.api.LedgerEntry;
import org.apache.bookkeeper.client.api.LedgerMetadata;
import org.apache.bookkeeper.client.api.ReadHandle;
import org.apache.bookkeeper.client.impl.LedgerEntriesImpl;
import org.apache.bookkeeper.client.impl.LedgerEntryImpl;
import org.apache.bookkeeper.common.util.OrderedScheduler;
import org.apache.bookkeeper.mledger.LedgerOffloaderStats;
import org.apache.bookkeeper.mledger.offload.jcloud.impl.BlobStoreManagedLedgerOffloader;
import org.apache.bookkeeper.mledger.offload.jcloud.impl.OffsetsCache;
import org.apache.bookkeeper.mledger.offload.jcloud.provider.TieredStorageConfiguration;
import org.apache.bookkeeper.net.BookieId;
import org.jclouds.ContextBuilder;
import org.jclouds.blobstore.BlobStore;
import org.jclouds.blobstore.BlobStoreContext;
import org.jclouds.s3.S3ApiMetadata;

/**
 * Pulsar's released offloader over a bucket. Arguments: endpoint, bucket, script file. Lines of the
 * script, one answer each: "read LEDGER UUID FIRST LAST" (entries in hex, "-" for an empty one),
 * "metadata LEDGER UUID" (last entry, length, ensemble, quorums, digest), "write LEDGER UUID FILE"
 * (FILE: an entry in hex a line), "delete LEDGER UUID".
 */
public final class Peer {
    private static BlobStoreManagedLedgerOffloader offloader;

    public static void main(String[] args) {
        try {
            run(args);
        } catch (Throwable error) { // the offloader's threads would keep the process alive
            error.printStackTrace();
            System.exit(1);
        }
        System.out.flush();
        System.exit(0);
    }

    private static void run(String[] args) throws Exception {
        Map<String, String> settings = new HashMap<>();
        settings.put("managedLedgerOffloadDriver", "S3");
        settings.put("managedLedgerOffloadBucket", args[1]);
        settings.put("managedLedgerOffloadServiceEndpoint", args[0]);
        settings.put("managedLedgerOffloadMaxBlockSizeInBytes", "5242880");
        OrderedScheduler threads =
                OrderedScheduler.newSchedulerBuilder().numThreads(2).name("offloader").build();
        offloader = BlobStoreManagedLedgerOffloader.create(
                new PathStyle(settings), Map.of(), threads, threads,
                LedgerOffloaderStats.create(false, false, null, 0), new OffsetsCache());
        for (String line : Files.readAllLines(Path.of(args[2]))) {
            System.out.println(answer(line.split(" ")));
        }
    }

    /** The bucket at the endpoint and nowhere else: its name is in the path, not in the host. */
    private static final class PathStyle extends TieredStorageConfiguration {
        PathStyle(Map<String, String> settings) {
            super(settings);
        }

        @Override
        public BlobStore getBlobStore() {
            Properties settings = new Properties();
            settings.setProperty("jclouds.s3.virtual-host-buckets", "false");
            settings.setProperty("jclouds.max-retries", "3");
            return ContextBuilder.newBuilder(new S3ApiMetadata()).endpoint(getServiceEndpoint())
                    .credentials("test", "test").overrides(settings)
                    .buildView(BlobStoreContext.class).getBlobStore();
        }
    }

    private static String answer(String[] words) throws Exception {
        long ledger = Long.parseLong(words[1]);
        UUID uuid = UUID.fromString(words[2]);
        switch (words[0]) {
            case "read":
                try (ReadHandle handle = opened(ledger, uuid)) {
                    return read(handle, Long.parseLong(words[3]), Long.parseLong(words[4]));
                }
            case "metadata":
                try (ReadHandle handle = opened(ledger, uuid)) {
                    LedgerMetadata found = handle.getLedgerMetadata();
                    return found.getLastEntryId() + " " + found.getLength() + " "
                            + found.getEnsembleSize() + " " + found.getWriteQuorumSize() + " "
                            + found.getAckQuorumSize() + " " + found.getDigestType();
                }
            case "write":
                offloader.offload(source(ledger, Files.readAllLines(Path.of(words[3]))), uuid,
                        Map.of("ManagedLedgerName", "public/default/persistent/topic")).get(60, TimeUnit.SECONDS);
                return "written";
            default:
                offloader.deleteOffloaded(ledger, uuid, offloader.getOffloadDriverMetadata()).get(60, TimeUnit.SECONDS);
                return "deleted";
        }
    }

    private static ReadHandle opened(long ledger, UUID uuid) throws Exception {
        return offloader.readOffloaded(ledger, uuid, offloader.getOffloadDriverMetadata()).get(60, TimeUnit.SECONDS);
    }

    private static String read(ReadHandle handle, long first, long last) throws Exception {
        List<String> found = new ArrayList<>();
        try (LedgerEntries entries = handle.read(first, last)) {
            for (LedgerEntry entry : entries) {
                byte[] bytes = entry.getEntryBytes();
                found.add(bytes.length == 0 ? "-" : HexFormat.of().formatHex(bytes));
            }
        }
        return String.join(" ", found);
    }

    /** A closed ledger; of its handle the offloader calls what is here. */
    private static ReadHandle source(long ledger, List<String> lines) {
        List<byte[]> bodies = new ArrayList<>();
        long length = 0;
        for (String line : lines) {
            bodies.add(HexFormat.of().parseHex(line));
            length += line.length() / 2;
        }
        long size = length;
        LedgerMetadata metadata = LedgerMetadataBuilder.create().withId(ledger)
                .withMetadataFormatVersion(3).withEnsembleSize(1).withWriteQuorumSize(1)
                .withAckQuorumSize(1).withDigestType(DigestType.CRC32C).withPassword(new byte[0])
                .withClosedState().withLastEntryId(bodies.size() - 1).withLength(length)
                .newEnsembleEntry(0L, List.of(BookieId.parse("127.0.0.1:3181"))).build();
        return (ReadHandle) Proxy.newProxyInstance(
                Peer.class.getClassLoader(), new Class<?>[] {ReadHandle.class},
                (proxy, method, words) -> switch (method.getName()) {
                    case "getId" -> ledger;
                    case "getLedgerMetadata" -> metadata;
                    case "getLastAddConfirmed" -> (long) bodies.size() - 1;
                    case "getLength" -> size;
                    case "isClosed" -> true;
                    case "readAsync" -> CompletableFuture.completedFuture(
                            entries(ledger, bodies, (long) words[0], (long) words[1]));
                    case "read" -> entries(ledger, bodies, (long) words[0], (long) words[1]);
                    case "closeAsync" -> CompletableFuture.completedFuture(null);
                    default -> throw new UnsupportedOperationException(method.getName());
                });
    }

    private static LedgerEntries entries(long ledger, List<byte[]> bodies, long first, long last) {
        List<LedgerEntry> found = new ArrayList<>();
        for (long at = first; at <= last; at++) {
            byte[] body = bodies.get((int) at);
            found.add(LedgerEntryImpl.create(ledger, at, body.length, Unpooled.wrappedBuffer(body)));
        }
        return LedgerEntriesImpl.create(found);
    }
}
