package io.streammeta.client;

import java.util.Map;
import java.util.OptionalLong;

/**
 * An object that a broker keeps for itself, found by name.
 *
 * @param name chosen by the broker, 1 to 512 bytes, unique in the cluster
 * @param objectId the id, which is part of the key in the bucket
 * @param size the size in bytes
 * @param crc32c the CRC-32C of its bytes, empty if unknown
 * @param committedAtMs when it was committed, in ms since 1970
 * @param owner the stream or key with which it is destroyed
 * @param metadata at most 16 labels, by key
 */
public record NamedObject(
        String name,
        long objectId,
        long size,
        OptionalLong crc32c,
        long committedAtMs,
        ObjectOwner owner,
        Map<String, String> metadata) {
    static NamedObject of(io.streammeta.v1.NamedObject object) {
        return new NamedObject(
                object.getName(),
                object.getObjectId(),
                object.getObjectSize(),
                Wire.checksum(object.hasCrc32C(), object.getCrc32C()),
                object.getCommittedAtMs(),
                object.hasOwnerStreamId()
                        ? new ObjectOwner.Stream(object.getOwnerStreamId())
                        : new ObjectOwner.Key(
                                object.getOwnerKey().getNamespace(),
                                object.getOwnerKey().getKey()),
                Wire.tags(object.getMetadataList()));
    }
}
