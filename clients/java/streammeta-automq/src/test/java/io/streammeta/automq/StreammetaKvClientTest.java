package io.streammeta.automq;

import static io.streammeta.automq.Node.get;
import static java.nio.charset.StandardCharsets.UTF_8;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import com.automq.stream.api.KVClient;
import com.automq.stream.api.KeyValue;
import com.automq.stream.api.KeyValue.Key;
import com.automq.stream.api.KeyValue.Value;
import io.streammeta.testkit.Controllers;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class StreammetaKvClientTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    @Test
    void aKeyIsPutReadAndDeleted() {
        try (Node node = Node.open(CONTROLLERS.endpoints(), 31)) {
            KVClient keys = node.metadata().keys();
            assertTrue(get(keys.getKV(Key.of("a"))).isNull());
            assertTrue(get(keys.delKV(Key.of("a"))).isNull());

            assertEquals("1", text(get(keys.putKVIfAbsent(value("a", "1")))));
            assertEquals("1", text(get(keys.putKVIfAbsent(value("a", "2")))));
            assertEquals("3", text(get(keys.putKV(value("a", "3")))));
            assertEquals("3", text(get(keys.getKV(Key.of("a")))));

            assertEquals("3", text(get(keys.delKV(Key.of("a")))));
            assertTrue(get(keys.getKV(Key.of("a"))).isNull());
        }
    }

    private static KeyValue value(String key, String text) {
        return KeyValue.of(key, UTF_8.encode(text));
    }

    private static String text(Value value) {
        return UTF_8.decode(value.get().duplicate()).toString();
    }
}
