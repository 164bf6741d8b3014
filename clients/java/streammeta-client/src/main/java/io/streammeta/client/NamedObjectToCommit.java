package io.streammeta.client;

import java.util.Map;
import java.util.OptionalLong;

/**
 * An object to name. Its bytes are in the bucket, under the key of its id.
 *
 * @param objectId a prepared id
 * @param name 1 to 512 bytes, without control characters, unique in the cluster
 * @param size the size in bytes
 * @param crc32c the CRC-32C of its bytes, empty if unknown
 * @param owner the stream or key with which it is destroyed
 * @param metadata at most 16 labels
 */
public record NamedObjectToCommit(
        long objectId,
        String name,
        long size,
        OptionalLong crc32c,
        ObjectOwner owner,
        Map<String, String> metadata) {
    io.streammeta.v1.NamedObjectToCommit toWire() {
        var object = io.streammeta.v1.NamedObjectToCommit.newBuilder()
                .setObjectId(objectId)
                .setName(name)
                .setObjectSize(size)
                .addAllMetadata(Wire.tags(metadata));
        crc32c.ifPresent(crc -> object.setCrc32C((int) crc));
        if (owner instanceof ObjectOwner.Stream stream) {
            object.setOwnerStreamId(stream.streamId());
        } else if (owner instanceof ObjectOwner.Key key) {
            object.getOwnerKeyBuilder().setNamespace(key.namespace()).setKey(key.key());
        }
        return object.build();
    }
}
