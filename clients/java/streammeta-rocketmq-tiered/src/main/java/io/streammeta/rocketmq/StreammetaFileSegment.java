package io.streammeta.rocketmq;

import io.opentelemetry.api.common.AttributesBuilder;
import io.streammeta.client.NamedObjectToCommit;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.function.Supplier;
import org.apache.rocketmq.logging.org.slf4j.Logger;
import org.apache.rocketmq.logging.org.slf4j.LoggerFactory;
import org.apache.rocketmq.tieredstore.MessageStoreConfig;
import org.apache.rocketmq.tieredstore.MessageStoreExecutor;
import org.apache.rocketmq.tieredstore.common.FileSegmentType;
import org.apache.rocketmq.tieredstore.metrics.TieredStoreMetricsConstant;
import org.apache.rocketmq.tieredstore.metrics.TieredStoreMetricsManager;
import org.apache.rocketmq.tieredstore.provider.FileSegment;
import org.apache.rocketmq.tieredstore.stream.FileSegmentInputStream;
import org.apache.rocketmq.tieredstore.util.MessageStoreUtil;

/**
 * A segment in the bucket. Each commit adds a named object, owned by the segment's key, so that all of them are destroyed
 * with it. Set {@code tieredBackendServiceProvider} to this class.
 *
 * <p>Its parts are listed once, and then known from its own commits. After a commit with an unknown outcome they are
 * listed again, and a repeat finds the parts of an earlier attempt.
 */
public final class StreammetaFileSegment extends FileSegment {
    private static final Logger LOG = LoggerFactory.getLogger(MessageStoreUtil.TIERED_STORE_LOGGER_NAME);

    private final SegmentObjects objects;
    private final SegmentName name;
    /** The parts, null if they have to be listed. */
    private SegmentParts parts;

    /** Describes a segment, as the broker does. Nothing is read before the first call. */
    public StreammetaFileSegment(
            MessageStoreConfig storeConfig,
            FileSegmentType fileType,
            String filePath,
            long baseOffset,
            MessageStoreExecutor executor) {
        this(Tier.of(storeConfig), storeConfig, fileType, filePath, baseOffset, executor);
    }

    StreammetaFileSegment(
            Tier tier,
            MessageStoreConfig storeConfig,
            FileSegmentType fileType,
            String filePath,
            long baseOffset,
            MessageStoreExecutor executor) {
        super(storeConfig, fileType, filePath, baseOffset, executor);
        this.objects = tier.objects();
        this.name = new SegmentName(filePath, fileType, baseOffset);
    }

    /** Returns the key of the segment. */
    @Override
    public String getPath() {
        return name.key();
    }

    /**
     * Returns the bytes of the segment. If the controllers don't answer, returns -1 while a failed commit waits to be
     * repeated, for which the broker asks again, and throws otherwise.
     */
    @Override
    public long getSize() {
        try {
            return parts().size();
        } catch (RuntimeException error) {
            // RocketMQ 5.3 begins or continues a segment at a wrong position after -1.
            if (fileSegmentInputStream == null) {
                throw error;
            }
            LOG.error("The size of segment '{}' is unknown, the broker will ask again", getPath(), error);
            return GET_FILE_SIZE_ERROR;
        }
    }

    /** Returns whether the segment has bytes. Throws if the controllers don't answer: a failed look is no absence. */
    @Override
    public boolean exists() {
        return parts().size() > 0;
    }

    /** Does nothing: the metadata has the segment's key, and the first commit creates an object. */
    @Override
    public void createFile() {}

    /** Deletes the segment with all its bytes. Throws if it may still exist. */
    @Override
    public void destroyFile() {
        close();
        synchronized (this) {
            parts = null;
            objects.destroy(name);
            parts = new SegmentParts();
        }
        LOG.info("Segment '{}' was deleted", getPath());
    }

    @Override
    public CompletableFuture<ByteBuffer> read0(long position, int length) {
        ByteBuffer target = ByteBuffer.allocate(length);
        return CompletableFuture.supplyAsync(this::parts, executor.bufferFetchExecutor)
                .thenCompose(known -> CompletableFuture.allOf(
                        readAll(known.slices(position, length), target).toArray(CompletableFuture[]::new)))
                .thenApply(none -> {
                    TieredStoreMetricsManager.downloadBytes.record(length, attributes().build());
                    return target;
                });
    }

    private List<CompletableFuture<Void>> readAll(List<SegmentParts.Slice> slices, ByteBuffer target) {
        List<CompletableFuture<Void>> reads = new ArrayList<>();
        int offset = 0;
        for (SegmentParts.Slice slice : slices) {
            ByteBuffer own = target.slice(offset, slice.length());
            offset += slice.length();
            reads.add(CompletableFuture.runAsync(
                    () -> measured("read", () -> {
                        objects.read(slice, own);
                        return null;
                    }),
                    executor.bufferFetchExecutor));
        }
        return reads;
    }

    @Override
    public CompletableFuture<Boolean> commit0(
            FileSegmentInputStream inputStream, long position, int length, boolean append) {
        return CompletableFuture.supplyAsync(
                () -> {
                    commit(inputStream, position, length, append);
                    TieredStoreMetricsManager.uploadBytes.record(length, attributes().build());
                    return true;
                },
                executor.bufferCommitExecutor);
    }

    /** One commit runs at a time. Reads of committed parts don't wait for it. */
    private void commit(FileSegmentInputStream bytes, long position, int length, boolean append) {
        SegmentParts known = append ? parts() : new SegmentParts();
        if (append && known.size() != position) {
            throw new IllegalStateException("segment '" + getPath() + "' ends at " + known.size()
                    + ", and the broker commits at " + position + ". It will correct its position");
        }
        try {
            List<NamedObjectToCommit> added = measured(
                    "write",
                    () -> append
                            ? objects.commit(name, position, bytes, length)
                            : objects.replace(name, bytes, length));
            added.forEach(part -> known.append(part.objectId(), part.size()));
            setParts(known);
        } catch (RuntimeException error) {
            setParts(null); // the outcome may be unknown
            throw error;
        }
    }

    private synchronized SegmentParts parts() {
        if (parts == null) {
            parts = objects.list(name);
        }
        return parts;
    }

    private synchronized void setParts(SegmentParts parts) {
        this.parts = parts;
    }

    private <T> T measured(String operation, Supplier<T> call) {
        long began = System.nanoTime();
        boolean success = false;
        try {
            T result = call.get();
            success = true;
            return result;
        } finally {
            TieredStoreMetricsManager.providerRpcLatency.record(
                    TimeUnit.NANOSECONDS.toMillis(System.nanoTime() - began),
                    attributes()
                            .put(TieredStoreMetricsConstant.LABEL_OPERATION, operation)
                            .put(TieredStoreMetricsConstant.LABEL_SUCCESS, success)
                            .build());
        }
    }

    private AttributesBuilder attributes() {
        return TieredStoreMetricsManager.newAttributesBuilder()
                .put(TieredStoreMetricsConstant.LABEL_PATH, filePath)
                .put(TieredStoreMetricsConstant.LABEL_FILE_TYPE, fileType.name().toLowerCase(Locale.ROOT));
    }
}
