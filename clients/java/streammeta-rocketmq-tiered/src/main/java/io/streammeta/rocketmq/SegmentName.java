package io.streammeta.rocketmq;

import java.nio.charset.StandardCharsets;
import org.apache.rocketmq.tieredstore.common.FileSegmentType;

/**
 * Name of a segment: its key in the metadata, which owns its parts, and the names of the parts.
 *
 * @param filePath the flat file, {@code broker/topic/queue}
 * @param type what it stores
 * @param baseOffset its first offset in the flat file
 */
record SegmentName(String filePath, FileSegmentType type, long baseOffset) {
    /** Prefix of the keys of all segments. */
    static final String ALL = "segment/";

    private static final int NAME_MAX_BYTES = 512;

    /** Returns the prefix of the keys of a flat file's segments. */
    static String prefix(String filePath, FileSegmentType type) {
        return ALL + filePath + "/" + type + "/";
    }

    /** Returns the key of the segment. Keys are in the order of base offsets. */
    String key() {
        return prefix(filePath, type) + padded(baseOffset);
    }

    /** Returns the prefix of the names of its parts, within a tier. */
    String partPrefix(String tier) {
        String prefix = tier + key() + "/";
        // Names are in the order of positions, which all have the same length.
        if (prefix.getBytes(StandardCharsets.UTF_8).length + padded(0).length() > NAME_MAX_BYTES) {
            throw new IllegalArgumentException("names that begin with '" + prefix + "' would have more than "
                    + NAME_MAX_BYTES + " bytes. Choose a shorter name of the cluster, the broker or the topic");
        }
        return prefix;
    }

    /** Returns a position as it ends the name of a part. */
    static String padded(long position) {
        return String.format("%020d", position);
    }
}
