package io.streammeta.store;

import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.Collection;
import java.util.stream.Stream;

/**
 * Immutable byte strings under keys. Any number of threads may share a store, and all calls block.
 *
 * <p>Every failure is a {@link StorageException}. Any call may throw {@link BucketNotFoundException},
 * {@link AccessDeniedException} and {@link StoreUnavailableException}. The methods below do not repeat them. A key has 1
 * to 1024 bytes in UTF-8, otherwise {@link InvalidKeyException} is thrown.
 */
public interface ObjectStore extends AutoCloseable {
    /**
     * Opens the store of an address, without a connection or access to files.
     *
     * <ul>
     *   <li>{@code s3://bucket?endpoint=..&region=..&pathStyle=..&accessKey=..&secretKey=..&checksum=..}, all options
     *       optional. Without keys they come from the environment. The checksum is md5, crc32 or crc32c.
     *   <li>{@code s3://host:port?s3-data-bucket=..&s3-endpoint-protocol=..&s3-region=..&s3-path-style=..
     *       &s3-access-key=..&s3-secret-key=..}
     *   <li>{@code file:///absolute/directory}
     * </ul>
     *
     * @throws IllegalArgumentException for an invalid address
     */
    static ObjectStore open(String address) {
        if (address.startsWith("s3://")) {
            return new S3ObjectStore(S3Address.parse(address));
        }
        if (address.startsWith("file:///")) {
            return LocalObjectStore.of(address);
        }
        throw new IllegalArgumentException("object store address is '" + address.replaceFirst("\\?.*", "")
                + "', expected s3://bucket?options or file:///absolute/directory");
    }

    /** Checks with one request that the bucket exists and the credentials work. */
    void check();

    /** Stores bytes durably and atomically, replacing an existing object. */
    void put(String key, ByteBuffer data);

    /** Stores the bytes of a file durably and atomically, replacing an existing object. At most 5 GiB. */
    void put(String key, Path file);

    /**
     * Stores bytes unless the key exists: at most one of any number of callers succeeds. After
     * {@link StoreUnavailableException} the object may exist.
     *
     * @throws ObjectExistsException if the key exists
     */
    void putIfAbsent(String key, ByteBuffer data);

    /**
     * Reads a whole object.
     *
     * @throws ObjectNotFoundException if the key does not exist
     */
    byte[] get(String key);

    /**
     * Reads bytes {@code [start, end)}, fewer if the object ends before.
     *
     * @throws ObjectNotFoundException if the key does not exist
     * @throws RangeNotSatisfiableException if {@code start} is not inside of the object
     */
    byte[] getRange(String key, long start, long end);

    /**
     * Opens bytes {@code [start, end)} for reading. The caller closes the stream, also before its end. Its reads may throw
     * an {@link java.io.IOException}. Throws the errors of {@link #getRange}.
     */
    InputStream openRange(String key, long start, long end);

    /**
     * Describes an object.
     *
     * @throws ObjectNotFoundException if the key does not exist
     */
    ObjectInfo head(String key);

    /** Describes the objects with a prefix, in UTF-8 byte order of their keys. Reading the stream fetches pages. */
    Stream<ObjectInfo> list(String prefix);

    /** Deletes objects. An absent key counts as deleted. */
    DeleteResult delete(Collection<String> keys);

    /** Closes connections. */
    @Override
    void close();
}
