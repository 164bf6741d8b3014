package io.streammeta.store;

import static java.nio.charset.StandardCharsets.UTF_8;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.List;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.io.TempDir;

/** The contract of all stores, held against a directory. */
class ObjectStoreTest {
    @TempDir
    Path folder;

    private ObjectStore store;

    ObjectStore open() throws IOException {
        return ObjectStore.open("file://" + folder.toRealPath());
    }

    @BeforeEach
    void openStore() throws IOException {
        store = open();
    }

    @AfterEach
    void closeStore() {
        store.close();
    }

    @Test
    void bytesAreReadAsWritten() throws IOException {
        store.check();
        store.put("a/b/1", bytes("0123456789"));

        assertArrayEquals("0123456789".getBytes(UTF_8), store.get("a/b/1"));
        assertArrayEquals("234".getBytes(UTF_8), store.getRange("a/b/1", 2, 5));
        assertArrayEquals("89".getBytes(UTF_8), store.getRange("a/b/1", 8, 100));
        assertEquals(10, store.head("a/b/1").size());
        try (InputStream range = store.openRange("a/b/1", 1, 4)) {
            assertArrayEquals("123".getBytes(UTF_8), range.readAllBytes());
        }
        try (InputStream range = store.openRange("a/b/1", 0, 10)) {
            assertEquals('0', range.read()); // closed before its end
        }
    }

    @Test
    void aFileIsStored() throws IOException {
        Path file = Files.write(folder.resolve("source"), new byte[300_000]);
        store.put("file", file);
        assertEquals(300_000, store.head("file").size());
        assertArrayEquals(new byte[300_000], store.get("file"));
    }

    @Test
    void aConditionalPutNeverReplaces() {
        store.putIfAbsent("once", bytes("first"));
        assertThrows(ObjectExistsException.class, () -> store.putIfAbsent("once", bytes("second")));
        assertArrayEquals("first".getBytes(UTF_8), store.get("once"));
        store.put("once", bytes("third"));
        assertArrayEquals("third".getBytes(UTF_8), store.get("once"));
    }

    @Test
    void errorsNameTheirCause() {
        store.put("short", bytes("12"));
        assertThrows(ObjectNotFoundException.class, () -> store.get("absent"));
        assertThrows(ObjectNotFoundException.class, () -> store.head("absent/too"));
        assertThrows(RangeNotSatisfiableException.class, () -> store.getRange("short", 2, 3));
        assertThrows(InvalidKeyException.class, () -> store.put("", bytes("1")));
        assertThrows(InvalidKeyException.class, () -> store.put("x".repeat(1025), bytes("1")));
    }

    @Test
    void listsAreInTheOrderOfBytes() {
        for (String key : List.of("b", "a/2", "a/1", "a!", "a/10", "\u00e4")) {
            store.put("list/" + key, bytes(key));
        }
        List<String> keys = store.list("list/").map(ObjectInfo::key).toList();
        assertEquals(List.of("list/a!", "list/a/1", "list/a/10", "list/a/2", "list/b", "list/\u00e4"), keys);
        assertEquals(3, store.list("list/a/").count());
    }

    @Test
    void absentKeysCountAsDeleted() {
        store.put("delete/1", bytes("1"));
        DeleteResult result = store.delete(List.of("delete/1", "delete/2")).requireAll();
        assertEquals(List.of("delete/1", "delete/2"), result.deleted());
        assertTrue(store.list("delete/").findAny().isEmpty());
    }

    private static ByteBuffer bytes(String text) {
        return ByteBuffer.wrap(text.getBytes(UTF_8));
    }
}
