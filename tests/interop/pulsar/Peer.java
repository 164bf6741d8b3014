import com.google.protobuf.DiscardUnknownFieldsParser;
import io.netty.buffer.Unpooled;
import java.io.InputStream;
import java.lang.reflect.InvocationTargetException;
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
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadHandle;
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadHandle.OfferEntryResult;
import org.apache.bookkeeper.mledger.LedgerOffloader.OffloadResult;
import org.apache.bookkeeper.mledger.LedgerOffloaderStats;
import org.apache.bookkeeper.mledger.ManagedLedger;
import org.apache.bookkeeper.mledger.impl.EntryImpl;
import org.apache.bookkeeper.mledger.offload.jcloud.impl.BlobStoreManagedLedgerOffloader;
import org.apache.bookkeeper.mledger.offload.jcloud.impl.OffsetsCache;
import org.apache.bookkeeper.mledger.offload.jcloud.provider.TieredStorageConfiguration;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.ManagedLedgerInfo.LedgerInfo;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.OffloadContext;
import org.apache.bookkeeper.mledger.proto.MLDataFormats.OffloadSegment;
import org.apache.bookkeeper.net.BookieId;
import org.jclouds.ContextBuilder;
import org.jclouds.blobstore.BlobStore;
import org.jclouds.blobstore.BlobStoreContext;
import org.jclouds.io.Payload;
import org.jclouds.io.Payloads;
import org.jclouds.s3.S3ApiMetadata;

/**
 * Pulsar's released offloader over a bucket. Arguments: endpoint, bucket, script file. Lines of the
 * script, one answer each: "read LEDGER UUID FIRST LAST" (entries in hex, "-" for an empty one),
 * "metadata LEDGER UUID" (last entry, length, ensemble, quorums, digest), "write LEDGER UUID FILE"
 * (FILE: an entry in hex a line), "delete LEDGER UUID". Of streaming offload: "stream UUID FILE"
 * (FILE: "LEDGER ENTRY HEX" a line, "-" for an empty one; answer: last ledger and entry), "segments
 * LEDGER FIRST LAST UUID..." ("ENTRY:HEX" each, in the order of the class), "drop UUID" (behind a
 * "stream"). "info HEX": a ledger's value of the list (its segments, each as uuid, last entry, driver, and all of it
 * in hex).
 */
public final class Peer {
    /** With five slashes: a test server takes user and signature with four of them for the name of a service. */
    private static final String USER = "tests/of/the/peer/of/pulsar";

    private static BlobStoreManagedLedgerOffloader offloader;
    /** The last that streamed: another one deletes a segment, and then fails. */
    private static BlobStoreManagedLedgerOffloader streaming;
    private static Map<String, String> settings;
    private static OrderedScheduler threads;

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
        settings = new HashMap<>();
        settings.put("managedLedgerOffloadDriver", "S3");
        settings.put("managedLedgerOffloadBucket", args[1]);
        settings.put("managedLedgerOffloadServiceEndpoint", args[0]);
        settings.put("managedLedgerOffloadMaxBlockSizeInBytes", "5242880");
        threads = OrderedScheduler.newSchedulerBuilder().numThreads(2).name("offloader").build();
        offloader = created();
        for (String line : Files.readAllLines(Path.of(args[2]))) {
            System.out.println(answer(line.split(" ")));
        }
    }

    private static BlobStoreManagedLedgerOffloader created() throws Exception {
        return BlobStoreManagedLedgerOffloader.create(new PathStyle(settings), Map.of(), threads, threads,
                LedgerOffloaderStats.create(false, false, null, 0), new OffsetsCache());
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
            BlobStore store = ContextBuilder.newBuilder(new S3ApiMetadata()).endpoint(getServiceEndpoint())
                    .credentials(USER, "test").overrides(settings)
                    .buildView(BlobStoreContext.class).getBlobStore();
            return (BlobStore) Proxy.newProxyInstance(Peer.class.getClassLoader(),
                    new Class<?>[] {BlobStore.class}, (proxy, method, words) -> {
                        if (method.getName().equals("uploadMultipartPart")) {
                            words[2] = measured((Payload) words[2]);
                        }
                        try {
                            return method.invoke(store, words);
                        } catch (InvocationTargetException error) {
                            throw error.getCause();
                        }
                    });
        }

        /** The same bytes with their length, which streaming offload leaves out and S3 needs. */
        private static Payload measured(Payload part) throws Exception {
            if (part.getContentMetadata().getContentLength() != null) {
                return part;
            }
            try (InputStream stream = part.openStream()) {
                return Payloads.newByteArrayPayload(stream.readAllBytes());
            }
        }
    }

    private static String answer(String[] words) throws Exception {
        switch (words[0]) {
            case "stream":
                return stream(UUID.fromString(words[1]), Files.readAllLines(Path.of(words[2])));
            case "segments":
                return segments(words);
            case "drop":
                streaming.deleteOffloaded(UUID.fromString(words[1]), streaming.getOffloadDriverMetadata())
                        .get(60, TimeUnit.SECONDS);
                return "dropped";
            case "info":
                return info(DiscardUnknownFieldsParser.wrap(LedgerInfo.parser())
                        .parseFrom(HexFormat.of().parseHex(words[1])));
            default:
                return ofLedger(words);
        }
    }

    private static String ofLedger(String[] words) throws Exception {
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

    /** Streams entries into one segment; an offloader makes no second one. */
    private static String stream(UUID uuid, List<String> lines) throws Exception {
        List<EntryImpl> entries = new ArrayList<>();
        for (String line : lines) {
            String[] words = line.split(" ");
            byte[] body = words[2].equals("-") ? new byte[0] : HexFormat.of().parseHex(words[2]);
            entries.add(EntryImpl.create(Long.parseLong(words[0]), Long.parseLong(words[1]), body));
        }
        EntryImpl first = entries.get(0);
        ManagedLedger managed = (ManagedLedger) Proxy.newProxyInstance(
                Peer.class.getClassLoader(), new Class<?>[] {ManagedLedger.class},
                (proxy, method, words) -> switch (method.getName()) {
                    case "getName" -> "public/default/persistent/topic";
                    case "getLedgerInfo" -> CompletableFuture.completedFuture(LedgerInfo.newBuilder()
                            .setLedgerId((long) words[0]).build());
                    default -> throw new UnsupportedOperationException(method.getName());
                });
        streaming = created();
        OffloadHandle handle = streaming.streamingOffload(managed, uuid, first.getLedgerId(), first.getEntryId(),
                offloader.getOffloadDriverMetadata()).get(60, TimeUnit.SECONDS);
        for (EntryImpl entry : entries) {
            OfferEntryResult result = handle.offerEntry(entry);
            while (result == OfferEntryResult.FAIL_BUFFER_FULL) { // an upload makes room
                Thread.sleep(5);
                result = handle.offerEntry(entry);
            }
            if (result != OfferEntryResult.SUCCESS) {
                throw new IllegalStateException(entry.getEntryId() + ": " + result);
            }
        }
        handle.close();
        OffloadResult result = handle.getOffloadResultAsync().get(60, TimeUnit.SECONDS);
        return result.endLedger + " " + result.endEntry;
    }

    private static String segments(String[] words) throws Exception {
        OffloadContext.Builder context = OffloadContext.newBuilder();
        for (int at = 4; at < words.length; at++) {
            UUID uuid = UUID.fromString(words[at]);
            context.addOffloadSegment(OffloadSegment.newBuilder().setUidMsb(uuid.getMostSignificantBits())
                    .setUidLsb(uuid.getLeastSignificantBits()).setComplete(true));
        }
        List<String> found = new ArrayList<>();
        try (ReadHandle handle = offloader.readOffloaded(Long.parseLong(words[1]), context.build(),
                        offloader.getOffloadDriverMetadata()).get(60, TimeUnit.SECONDS);
                LedgerEntries entries = handle.readAsync(Long.parseLong(words[2]), Long.parseLong(words[3]))
                        .get(60, TimeUnit.SECONDS)) {
            for (LedgerEntry entry : entries) {
                found.add(entry.getEntryId() + ":" + HexFormat.of().formatHex(entry.getEntryBytes()));
            }
        }
        return String.join(" ", found);
    }

    private static String info(LedgerInfo found) {
        List<String> told = new ArrayList<>();
        for (OffloadSegment one : found.getOffloadContext().getOffloadSegmentList()) {
            told.add(new UUID(one.getUidMsb(), one.getUidLsb()) + " " + one.getEndEntryId() + " "
                    + one.getDriverMetadata().getName());
        }
        told.add(HexFormat.of().formatHex(found.toByteArray()));
        return String.join(" ", told);
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
