package io.streammeta.client;

import com.google.protobuf.ByteString;
import io.streammeta.v1.KVToPut;
import java.util.OptionalLong;

/**
 * A value to put, alone or together with a commit.
 *
 * @param namespace the namespace, empty for the default one
 * @param key the key, at most 1024 bytes
 * @param value the bytes, at most 1 MiB
 * @param expectedVersion put only if the key is at this version, 0 for an absent key. Empty: always
 */
public record ValueToPut(String namespace, String key, byte[] value, OptionalLong expectedVersion) {
    KVToPut toWire() {
        KVToPut.Builder put = KVToPut.newBuilder()
                .setNamespace(namespace)
                .setKey(key)
                .setValue(ByteString.copyFrom(value))
                .setOverwrite(expectedVersion.isEmpty());
        expectedVersion.ifPresent(put::setExpectedVersion);
        return put.build();
    }
}
