package io.streammeta.client;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.v1.KVResult;

/**
 * Outcome of one put.
 *
 * @param error {@link ErrorCode#KEY_EXIST} if the key is at another version than the expected one
 * @param value the value that is stored now, of this put or of the one in the way
 * @param version the version of that value, 0 if the key is absent
 */
public record PutResult(ErrorCode error, byte[] value, long version) {
    static PutResult of(KVResult result) {
        return new PutResult(Wire.code(result.getError()), result.getValue().toByteArray(), result.getVersion());
    }
}
