package io.streammeta.client;

import static io.streammeta.client.StreammetaClient.await;
import static java.nio.charset.StandardCharsets.UTF_8;
import static org.junit.jupiter.api.Assertions.assertArrayEquals;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.errors.InvalidRequestException;
import io.streammeta.client.errors.KeyConflictException;
import io.streammeta.testkit.Controllers;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import org.junit.jupiter.api.AfterAll;
import org.junit.jupiter.api.BeforeAll;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class KeyValuesTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static StreammetaClient client;

    @BeforeAll
    static void connect() {
        client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build();
    }

    @AfterAll
    static void close() {
        client.close();
    }

    @Test
    void aValueIsStoredWithAGrowingVersion() {
        KeyValues keys = client.keyValues("versions");
        long first = await(keys.put("key", bytes("1")));
        long second = await(keys.put("key", bytes("2")));

        KeyValue found = await(keys.get("key")).orElseThrow();
        assertTrue(second > first && first > 0);
        assertEquals(second, found.version());
        assertArrayEquals(bytes("2"), found.value());
        assertTrue(await(keys.get("absent")).isEmpty());
    }

    @Test
    void aConditionalPutRejectsAnotherVersion() {
        KeyValues keys = client.keyValues("conditions");
        long version = await(keys.putIfAbsent("key", bytes("1")));

        var conflict = assertThrows(KeyConflictException.class, () -> await(keys.putIfAbsent("key", bytes("2"))));
        assertEquals(ErrorCode.KEY_EXIST, conflict.code());
        assertThrows(KeyConflictException.class, () -> await(keys.putIfVersion("key", bytes("2"), version + 1)));
        // The value of an earlier attempt is no conflict.
        assertEquals(version, await(keys.putIfAbsent("key", bytes("1"))));
        assertTrue(await(keys.putIfVersion("key", bytes("2"), version)) > version);
        assertThrows(KeyConflictException.class, () -> await(keys.deleteIfVersion("key", version)));
    }

    @Test
    void listsAreReadPageByPage() {
        KeyValues keys = client.keyValues("lists");
        List<ValueToPut> values = new ArrayList<>();
        for (int number = 0; number < 12_000; number++) {
            values.add(new ValueToPut(
                    "lists", String.format("key-%05d", number), bytes("v" + number), OptionalLong.empty()));
        }
        await(keys.putAll(values));

        List<KeyValue> found = await(keys.list("key-").toList());
        assertEquals(12_000, found.size());
        assertEquals("key-11999", found.get(11_999).key());
        assertArrayEquals(bytes("v11999"), found.get(11_999).value());
        Map<String, KeyValue> some = await(keys.getAll(List.of("key-00007", "absent", "key-11000")));
        assertEquals(Set.of("key-00007", "key-11000"), some.keySet());

        await(keys.deleteAll(found.stream().map(KeyValue::key).toList()));
        assertEquals(List.of(), await(keys.listKeys("").toList()));
    }

    @Test
    void anInvalidFieldIsNamed() {
        var error = assertThrows(
                InvalidRequestException.class, () -> await(client.keyValues("fields").put("", bytes("1"))));
        assertEquals("INVALID_FIELD", error.reason());
        assertTrue(error.field().contains("key"), error.field());
    }

    private static byte[] bytes(String text) {
        return text.getBytes(UTF_8);
    }
}
