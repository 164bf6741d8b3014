package com.automq.stream.s3.compact;

import com.automq.stream.s3.metadata.S3ObjectMetadata;
import com.automq.stream.s3.metadata.StreamMetadata;
import com.automq.stream.s3.objects.ObjectManager;
import com.automq.stream.s3.streams.StreamManager;
import java.util.List;

/** The forced split of AutoMQ's compaction, at once: {@code compact} takes a minute or more for any number of bytes. */
public final class Unthrottled {
    private Unthrottled() {}

    /** Splits all stream set objects of a node into stream objects. */
    public static void split(CompactionManager compaction, ObjectManager objects, StreamManager streams) {
        List<S3ObjectMetadata> sources = objects.getServerObjects().join();
        compaction.forceSplitObjects(known(compaction, sources, streams), sources);
    }

    private static List<StreamMetadata> known(
            CompactionManager compaction, List<S3ObjectMetadata> sources, StreamManager streams) {
        compaction.updateStreamDataBlockMap(sources);
        List<StreamMetadata> known = streams.getStreams(compaction.collectStreamIdsAndCheckBlockSize()).join();
        compaction.filterInvalidStreamDataBlocks(known);
        return known;
    }
}
