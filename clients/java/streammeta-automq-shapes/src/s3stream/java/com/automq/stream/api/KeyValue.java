package com.automq.stream.api;

import java.nio.ByteBuffer;

/** Shape of a key and its value. */
public class KeyValue {
    private final Key key;
    private final Value value;

    private KeyValue(Key key, Value value) {
        this.key = key;
        this.value = value;
    }

    public static KeyValue of(String key, ByteBuffer value) {
        return new KeyValue(Key.of(key), Value.of(value));
    }

    public Key key() {
        return key;
    }

    public Value value() {
        return value;
    }

    public static class Key {
        private final String key;

        private Key(String key) {
            this.key = key;
        }

        public static Key of(String key) {
            return new Key(key);
        }

        public String get() {
            return key;
        }
    }

    public static class Value {
        private final ByteBuffer value;

        private Value(ByteBuffer value) {
            this.value = value;
        }

        public static Value of(ByteBuffer value) {
            return new Value(value);
        }

        public ByteBuffer get() {
            return value;
        }

        public boolean isNull() {
            return value == null;
        }
    }
}
