package io.streammeta.client;

/**
 * A value of a key.
 *
 * @param key the key, within its namespace
 * @param value the bytes, empty in a listing of keys alone
 * @param version a number that each put of the key makes larger, never 0
 */
public record KeyValue(String key, byte[] value, long version) {}
