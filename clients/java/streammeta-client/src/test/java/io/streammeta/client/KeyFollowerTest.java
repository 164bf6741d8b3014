package io.streammeta.client;

import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.testkit.Controllers;
import io.streammeta.testkit.Relay;
import java.util.Map;
import java.util.Random;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentSkipListMap;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.Timeout;
import org.junit.jupiter.api.extension.RegisterExtension;

@Timeout(120)
class KeyFollowerTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.behindRelays();

    @Test
    void aCacheHasTheKeysOfTheMetadata() throws InterruptedException {
        try (StreammetaClient client =
                StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build()) {
            KeyValues keys = client.keyValues("followed");
            Random random = new Random(7);
            TreeMap<String, Integer> expected = new TreeMap<>();
            change(keys, random, expected, 40);

            Cache cache = new Cache();
            KeyFollower follower = client.followKeys("followed", "key-", cache);
            await(follower.listed("key-1"));
            assertEquals(expected.subMap("key-1", "key-2"), cache.values.subMap("key-1", "key-2"));
            await(follower.listed());
            assertEquals(expected, cache.values);

            await(keys.put("other", new byte[] {1}));
            for (int round = 0; round < 5; round++) {
                change(keys, random, expected, 30);
                CONTROLLERS.relays().forEach(Relay::resetAll);
            }
            cache.await(expected);

            follower.close();
            await(keys.put("key-late", new byte[] {1}));
            assertTrue(!cache.values.containsKey("key-late"));
        }
    }

    private static void change(KeyValues keys, Random random, Map<String, Integer> expected, int count) {
        for (int number = 0; number < count; number++) {
            String key = "key-" + random.nextInt(20);
            if (random.nextInt(3) == 0) {
                await(keys.delete(key));
                expected.remove(key);
            } else {
                int value = random.nextInt(100);
                await(keys.put(key, new byte[] {(byte) value}));
                expected.put(key, value);
            }
        }
    }

    private static final class Cache implements KeyListener {
        private final ConcurrentSkipListMap<String, Integer> values = new ConcurrentSkipListMap<>();

        @Override
        public void onPut(KeyValue value) {
            values.put(value.key(), (int) value.value()[0]);
        }

        @Override
        public void onDeleted(String key) {
            values.remove(key);
        }

        void await(Map<String, Integer> expected) throws InterruptedException {
            for (int look = 0; look < 200 && !values.equals(expected); look++) {
                Thread.sleep(100);
            }
            assertEquals(expected, values);
        }
    }
}
