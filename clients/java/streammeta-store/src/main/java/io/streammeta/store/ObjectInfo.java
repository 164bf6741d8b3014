package io.streammeta.store;

/**
 * Description of an object.
 *
 * @param key the key
 * @param size the size in bytes
 * @param lastModifiedMs when it was written, in ms since 1970
 * @param etag an opaque text that other bytes under the key change
 */
public record ObjectInfo(String key, long size, long lastModifiedMs, String etag) {}
