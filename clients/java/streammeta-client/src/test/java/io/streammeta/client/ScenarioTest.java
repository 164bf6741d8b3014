package io.streammeta.client;

import static io.streammeta.client.StreammetaClient.await;
import static java.nio.charset.StandardCharsets.UTF_8;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertNotNull;
import static org.junit.jupiter.api.DynamicTest.dynamicTest;

import io.streammeta.client.errors.RejectedException;
import io.streammeta.client.errors.StreammetaException;
import io.streammeta.client.transport.Calls;
import io.streammeta.client.transport.Method;
import io.streammeta.testkit.Controllers;
import io.streammeta.v1.TransferLeadershipRequest;
import io.streammeta.v1.TransferLeadershipResponse;
import java.io.IOException;
import java.io.InputStream;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.stream.Stream;
import org.junit.jupiter.api.DynamicTest;
import org.junit.jupiter.api.TestFactory;
import org.junit.jupiter.api.extension.RegisterExtension;
import org.yaml.snakeyaml.Yaml;

/** Runs tests/clients/scenarios.yaml, the table of steps and outcomes that the clients of all languages share. */
class ScenarioTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static final Path TABLE =
            Path.of(System.getProperty("streammeta.repository"), "tests/clients/scenarios.yaml");
    private static final Duration LIMIT = Duration.ofSeconds(30);

    /** An administrator's call, which is not part of the client. */
    private static final Method<TransferLeadershipRequest, TransferLeadershipResponse> TRANSFER_LEADERSHIP =
            new Method<>(
                    "AdminService/TransferLeadership",
                    TransferLeadershipRequest.getDefaultInstance(),
                    TransferLeadershipResponse.getDefaultInstance(),
                    true,
                    false);

    @TestFactory
    Stream<DynamicTest> everyScenario() throws IOException {
        try (InputStream table = Files.newInputStream(TABLE)) {
            List<Object> scenarios = new Yaml().load(table);
            return scenarios.stream().map(ScenarioTest::map).map(scenario -> dynamicTest(
                    (String) scenario.get("name"), () -> {
                        try (Runner runner = new Runner()) {
                            for (Object step : list(scenario.get("steps"))) {
                                runner.run(map(step));
                            }
                        }
                    }));
        }
    }

    @SuppressWarnings("unchecked")
    private static Map<String, Object> map(Object value) {
        return value == null ? Map.of() : (Map<String, Object>) value;
    }

    @SuppressWarnings("unchecked")
    private static List<Object> list(Object value) {
        return (List<Object>) value;
    }

    /** Returns a value with all its numbers as {@code long}: YAML has the smallest type that fits. */
    private static Object normalize(Object value) {
        if (value instanceof Map<?, ?> words) {
            Map<Object, Object> normalized = new HashMap<>();
            words.forEach((name, word) -> normalized.put(name, normalize(word)));
            return normalized;
        }
        if (value instanceof List<?> items) {
            return Arrays.asList(items.stream().map(ScenarioTest::normalize).toArray());
        }
        return value instanceof Number number ? (Object) number.longValue() : value;
    }

    /** Runs the steps of one scenario. */
    private static final class Runner implements AutoCloseable {
        private final StreammetaClient client =
                StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build();
        private final Map<String, Object> saved = new HashMap<>();
        private final Map<Object, BrokerSession> sessions = new HashMap<>();
        /** The streams as they were opened last, and the sessions that opened them. */
        private final Map<Long, OpenedStream> opened = new HashMap<>();

        private final Map<Long, BrokerSession> owners = new HashMap<>();

        @Override
        public void close() {
            sessions.values().forEach(BrokerSession::close);
            client.close();
        }

        void run(Map<String, Object> written) throws InterruptedException {
            Step step = new Step(map(normalize(resolve(written))));
            Map<String, Object> results;
            try {
                results = map(normalize(perform(step)));
            } catch (RejectedException error) {
                results = Map.of("error", error.reason());
            }

            Map<String, Object> expected = map(step.words.get("expect"));
            Map<String, Object> seen = new HashMap<>(results);
            if (!results.containsKey("error")) {
                seen.keySet().retainAll(expected.keySet());
            }
            assertEquals(expected, seen, step::toString);
            for (var save : map(step.words.get("save")).entrySet()) {
                saved.put(save.getKey(), results.get(save.getValue()));
            }
        }

        /** Replaces names by the values that were saved under them. */
        private Object resolve(Object value) {
            if (value instanceof Map<?, ?> words) {
                Map<Object, Object> resolved = new HashMap<>();
                words.forEach((name, word) -> resolved.put(name, resolve(word)));
                return resolved;
            }
            if (value instanceof List<?> items) {
                return items.stream().map(this::resolve).toList();
            }
            if (!(value instanceof String text) || !text.startsWith("$")) {
                return value;
            }
            String[] parts = text.substring(1).split(" \\+ ");
            Object result = saved.get(parts[0]);
            return parts.length == 1 ? result : (Object) ((long) result + Long.parseLong(parts[1]));
        }

        private Map<String, Object> perform(Step step) throws InterruptedException {
            BrokerSession session = sessions.get(step.words.get("node"));
            KeyValues keys = client.keyValues(step.text("namespace"));
            return switch (step.text("do")) {
                case "register" -> register(step);
                // The session sends its heartbeats by itself. This is the one that a broker can ask for.
                case "heartbeat" -> Map.of("may_shut_down", await(session.requestShutdown()));
                case "create_stream" -> Map.of("stream", await(session.streams().create(step.tags())));
                case "open_stream" -> open(session, step.number("stream"));
                case "close_stream", "delete_stream", "trim" -> change(step);
                case "describe_stream" -> describe(step.number("stream"));
                case "find_streams" -> Map.of(
                        "streams",
                        await(client.streams().find(step.tags()).toList()).stream()
                                .map(StreamDescription::streamId)
                                .toList());
                case "prepare" -> Map.of(
                        "first",
                        await(session.objects().prepare((int) step.number("count"), Duration.ofMinutes(1)))
                                .firstObjectId());
                case "commit" -> commit(session, step);
                case "name_objects" -> name(session, step);
                case "delete_objects" -> Map.of("key_deleted", delete(session, step));
                case "count_objects" -> Map.of(
                        "count",
                        await(client.namedObjects().list(step.text("prefix")).toList()).size());
                case "objects" -> locate(step.number("stream"), step.number("start"), step.number("end"));
                case "put" -> Map.of("version", await(step.version().isPresent()
                        ? keys.putIfVersion(step.text("key"), step.bytes("value"), step.version().getAsLong())
                        : keys.put(step.text("key"), step.bytes("value"))));
                case "get" -> get(keys, step.text("key"));
                case "delete" -> none(await(step.version().isPresent()
                        ? keys.deleteIfVersion(step.text("key"), step.version().getAsLong())
                        : keys.delete(step.text("key"))));
                case "list" -> Map.of(
                        "keys",
                        await(keys.listKeys(step.text("prefix")).toList()).stream()
                                .map(KeyValue::key)
                                .toList());
                case "end_offset" -> Map.of("offset", await(client.describeCluster()).highWatermark().getAsLong());
                case "watch_keys" -> watch(step);
                case "move_leadership" -> moveLeadership();
                default -> throw new IllegalArgumentException("unknown step " + step);
            };
        }

        private static Map<String, Object> none(Void nothing) {
            return Map.of();
        }

        private Map<String, Object> register(Step step) {
            long epoch = step.words.containsKey("epoch") ? step.number("epoch") : System.currentTimeMillis();
            NodeIdentity node = new NodeIdentity((int) step.number("node"), epoch);
            Object name = step.words.getOrDefault("as", step.words.get("node"));
            sessions.put(name, await(client.openSession(node, SessionOptions.DEFAULT)));
            return Map.of();
        }

        private Map<String, Object> open(BrokerSession session, long streamId) {
            OptionalLong epoch = await(client.streams().describe(streamId)).orElseThrow().epoch();
            StreamToOpen stream = new StreamToOpen(streamId, epoch.orElse(-1) + 1, Map.of(), true);
            OpenedStream result = await(session.streams().open(stream));
            opened.put(streamId, result);
            owners.put(streamId, session);
            return Map.of("start", result.startOffset(), "next", result.nextOffset());
        }

        private Map<String, Object> change(Step step) {
            long streamId = step.number("stream");
            long epoch = opened.get(streamId).epoch();
            NodeStreams streams = owners.get(streamId).streams();
            return switch (step.text("do")) {
                case "close_stream" -> none(await(streams.close(new StreamToClose(streamId, epoch))));
                case "delete_stream" -> none(await(streams.delete(streamId, OptionalLong.of(epoch))));
                default -> Map.of(
                        "start", await(streams.trim(new StreamToTrim(streamId, epoch, step.number("start"), 0))));
            };
        }

        private Map<String, Object> describe(long streamId) {
            Optional<StreamDescription> found = await(client.streams().describe(streamId));
            if (found.isEmpty()) {
                return Map.of("error", "STREAM_NOT_EXIST");
            }
            StreamDescription stream = found.get();
            return Map.of(
                    "start", stream.startOffset(),
                    "end", stream.endOffset(),
                    "state", stream.isOpen() ? "OPENED" : "CLOSED",
                    "node", stream.nodeId().orElse(-1));
        }

        private Map<String, Object> commit(BrokerSession session, Step step) {
            Commit.Builder commit = Commit.of(step.number("object_id"), ObjectFacts.ofSize(step.number("size")));
            for (Object row : list(step.words.get("ranges"))) {
                long streamId = (long) list(row).get(0);
                long start = (long) list(row).get(1);
                long end = (long) list(row).get(2);
                commit.range(new StreamSlice(streamId, opened.get(streamId).epoch(), start, end));
            }
            await(session.pipeline().submit(commit.build())).requireCommitted(step.toString());
            return Map.of();
        }

        private static Map<String, Object> name(BrokerSession session, Step step) {
            ObjectOwner owner = new ObjectOwner.Key(step.text("namespace"), step.text("key"));
            PreparedObjects prepared =
                    await(session.objects().prepare((int) step.number("count"), Duration.ofMinutes(1)));
            List<NamedObjectToCommit> objects = prepared.ids().stream()
                    .map(id -> new NamedObjectToCommit(
                            id, step.text("prefix") + id, 0, OptionalLong.empty(), owner, Map.of()))
                    .toList();
            for (int start = 0; start < objects.size(); start += 1000) {
                List<NamedObjectToCommit> batch = objects.subList(start, Math.min(start + 1000, objects.size()));
                await(session.namedObjects().commit(batch));
            }
            return Map.of();
        }

        private static boolean delete(BrokerSession session, Step step) {
            NodeNamedObjects objects = session.namedObjects();
            ObjectOwner.Key owner = new ObjectOwner.Key(step.text("namespace"), step.text("key"));
            if ((boolean) step.words.get("with_key")) {
                return await(objects.deleteAllWithOwner(owner));
            }
            await(objects.deleteAllOf(owner));
            return false;
        }

        private Map<String, Object> locate(long streamId, long start, long end) {
            ObjectList found = await(client.objects().locate(streamId, start, OptionalLong.of(end), 100));
            if (!found.error().isSuccess()) {
                return Map.of("error", found.error().name());
            }
            List<List<Long>> rows = found.objects().stream()
                    .map(slice -> List.of(
                            slice.objectId(), slice.offsets().start(), slice.offsets().end()))
                    .toList();
            return Map.of("objects", rows, "end", found.streamEndOffset().getAsLong());
        }

        private static Map<String, Object> get(KeyValues keys, String key) {
            Map<String, Object> results = new HashMap<>();
            Optional<KeyValue> found = await(keys.get(key));
            results.put("value", found.map(entry -> new String(entry.value(), UTF_8)).orElse(null));
            found.ifPresent(entry -> results.put("version", entry.version()));
            return results;
        }

        private Map<String, Object> watch(Step step) throws InterruptedException {
            BlockingQueue<MetadataChange> received = new LinkedBlockingQueue<>();
            WatchSelection selection = WatchSelection.ofKeys(step.text("namespace"), step.text("prefix"));
            List<List<String>> changes = new ArrayList<>();
            Watch watch = await(client.watch(selection.from(step.number("from")), new Listener(received)));
            while (changes.size() < step.number("count")) {
                var change = (MetadataChange.Key) received.poll(LIMIT.toSeconds(), TimeUnit.SECONDS);
                assertNotNull(change, () -> "the watch reported only " + changes);
                String value = change.value().map(entry -> new String(entry.value(), UTF_8)).orElse(null);
                changes.add(Arrays.asList(change.key(), value));
            }
            watch.close();
            return Map.of("changes", changes);
        }

        private static Map<String, Object> moveLeadership() {
            try (Calls calls = new Calls(CONTROLLERS.endpoints(), null, LIMIT, LIMIT, new ClientMetrics())) {
                await(calls.call(TRANSFER_LEADERSHIP, TransferLeadershipRequest.getDefaultInstance()));
            }
            return Map.of();
        }
    }

    /** One row of the table, with numbers as {@code long}. */
    private record Step(Map<String, Object> words) {
        String text(String name) {
            return (String) words.getOrDefault(name, "");
        }

        byte[] bytes(String name) {
            return text(name).getBytes(UTF_8);
        }

        long number(String name) {
            return (long) words.get(name);
        }

        OptionalLong version() {
            return words.containsKey("version") ? OptionalLong.of(number("version")) : OptionalLong.empty();
        }

        Map<String, String> tags() {
            Map<String, String> tags = new HashMap<>();
            map(words.get("tags")).forEach((name, value) -> tags.put(name, (String) value));
            return tags;
        }
    }

    private record Listener(BlockingQueue<MetadataChange> received) implements WatchListener {
        @Override
        public void onChanges(List<MetadataChange> changes) {
            received.addAll(changes);
        }

        @Override
        public void onEnd(StreammetaException error) {
            throw error;
        }
    }
}
