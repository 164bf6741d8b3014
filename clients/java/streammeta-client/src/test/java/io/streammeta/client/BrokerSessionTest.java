package io.streammeta.client;

import static io.streammeta.client.StreammetaClient.await;
import static org.junit.jupiter.api.Assertions.assertEquals;
import static org.junit.jupiter.api.Assertions.assertFalse;
import static org.junit.jupiter.api.Assertions.assertThrows;
import static org.junit.jupiter.api.Assertions.assertTrue;

import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.errors.InvalidRequestException;
import io.streammeta.client.errors.KeyNotFoundException;
import io.streammeta.client.errors.NodeEpochExpiredException;
import io.streammeta.client.errors.NodeNotRegisteredException;
import io.streammeta.client.errors.StreamFencedException;
import io.streammeta.testkit.Controllers;
import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import java.util.concurrent.CompletableFuture;
import org.junit.jupiter.api.AfterEach;
import org.junit.jupiter.api.BeforeEach;
import org.junit.jupiter.api.Test;
import org.junit.jupiter.api.extension.RegisterExtension;

class BrokerSessionTest {
    @RegisterExtension
    static final Controllers CONTROLLERS = Controllers.inPlainText();

    private static final Duration TIME_TO_COMMIT = Duration.ofMinutes(1);

    private StreammetaClient client;
    private BrokerSession session;

    @BeforeEach
    void open() {
        client = StreammetaClient.builder().endpoints(CONTROLLERS.endpoints()).build();
        NodeIdentity node = new NodeIdentity(1, System.currentTimeMillis());
        session = await(client.openSession(node, SessionOptions.DEFAULT.withTags(Map.of("rack", "a"))));
    }

    @AfterEach
    void close() {
        session.close();
        client.close();
    }

    @Test
    void aNewerProcessFencesAnOlderOne() {
        NodeDescription node = await(client.nodes().describe(1)).orElseThrow();
        assertEquals(session.node(), node.identity());
        assertEquals(Map.of("rack", "a"), node.tags());

        NodeIdentity newer = new NodeIdentity(1, session.node().nodeEpoch() + 1);
        try (BrokerSession other = await(client.openSession(newer, SessionOptions.DEFAULT))) {
            assertEquals(newer, other.node());
            assertThrows(NodeEpochExpiredException.class, () -> await(session.streams().create(Map.of())));
        }
    }

    @Test
    void aStreamLivesFromCreationToDeletion() {
        NodeStreams streams = session.streams();
        long streamId = await(streams.create(Map.of("topic", "life")));
        OpenedStream opened = await(streams.open(new StreamToOpen(streamId, 1)));
        assertEquals(new OpenedStream(streamId, 1, 0, 0), opened);
        assertThrows(StreamFencedException.class, () -> await(streams.open(new StreamToOpen(streamId, 0))));

        PreparedObjects prepared = await(session.objects().prepare(1, TIME_TO_COMMIT));
        Commit commit = upload(prepared.firstObjectId(), streamId, 0, 100);
        assertTrue(await(session.objects().commit(commit)).isCommitted());
        // A repeat gets the first answer.
        assertTrue(await(session.pipeline().submit(commit)).isCommitted());

        ObjectList found = await(client.objects().locate(streamId, 0, OptionalLong.empty(), 10));
        assertEquals(prepared.firstObjectId(), found.objects().get(0).objectId());
        assertEquals(new OffsetRange(0, 100), found.objects().get(0).offsets());
        assertEquals(OptionalLong.of(7), found.objects().get(0).facts().crc32c());
        assertEquals(
                List.of(ObjectState.COMMITTED),
                await(client.objects().check(prepared.ids())));
        StreamSetObject listed = await(client.objects().listStreamSetObjects(1, true).toList()).stream()
                .filter(object -> object.objectId() == prepared.firstObjectId())
                .findFirst()
                .orElseThrow();
        assertEquals(List.of(new StreamSlice(streamId, StreamSlice.UNCHECKED, 0, 100)), listed.ranges());

        assertEquals(40, await(streams.trim(new StreamToTrim(streamId, 1, 40, 0))));
        await(streams.close(new StreamToClose(streamId, 1)));
        StreamDescription description = await(client.streams().describe(streamId, Streams.Include.RANGES))
                .orElseThrow();
        assertFalse(description.isOpen());
        assertEquals(40, description.startOffset());
        assertEquals(new OffsetRange(40, 100), description.ranges().get(0).offsets());
        assertEquals(
                List.of(streamId),
                await(client.streams().findOf(1, Map.of("topic", "life")).toList()).stream()
                        .map(StreamDescription::streamId)
                        .toList());

        await(streams.delete(streamId, OptionalLong.of(1)));
        assertTrue(await(client.streams().describe(streamId)).isEmpty());
    }

    @Test
    void thePipelineDecidesInTheOrderOfSubmission() {
        long streamId = await(session.streams().create(Map.of()));
        await(session.streams().open(new StreamToOpen(streamId, 1)));
        int count = 500;
        PreparedObjects prepared = await(session.objects().prepare(count, TIME_TO_COMMIT));

        List<CompletableFuture<CommitVerdict>> verdicts = new ArrayList<>();
        for (int number = 0; number < count; number++) {
            verdicts.add(session.pipeline()
                    .submit(upload(prepared.firstObjectId() + number, streamId, number * 10L, number * 10L + 10)));
        }
        // The offsets are committed already, so this one is rejected alone.
        PreparedObjects wrong = await(session.objects().prepare(1, TIME_TO_COMMIT));
        CommitVerdict rejected =
                await(session.pipeline().submit(upload(wrong.firstObjectId(), streamId, 0, 10)));

        verdicts.forEach(verdict -> assertTrue(await(verdict).isCommitted()));
        assertFalse(rejected.isCommitted());
        assertEquals(List.of(ErrorCode.OFFSET_NOT_MATCHED), rejected.rangeErrors());
        assertEquals(
                count * 10L, await(client.streams().describe(streamId)).orElseThrow().endOffset());
        assertEquals(count, client.metrics().commitsAccepted());
        assertEquals(1, client.metrics().commitsRejected());
    }

    @Test
    void anInvalidCommitFailsAlone() {
        long streamId = await(session.streams().create(Map.of()));
        await(session.streams().open(new StreamToOpen(streamId, 1)));
        PreparedObjects prepared = await(session.objects().prepare(61, TIME_TO_COMMIT));

        List<CompletableFuture<CommitVerdict>> verdicts = new ArrayList<>();
        CompletableFuture<CommitVerdict> invalid = null;
        for (int number = 0; number < 60; number++) {
            verdicts.add(session.pipeline()
                    .submit(upload(prepared.firstObjectId() + number, streamId, number, number + 1)));
            if (number == 37) {
                // A status rejects the whole message, whichever commit breaks the rule.
                invalid = session.pipeline().submit(upload(prepared.firstObjectId() + 60, streamId, 5, 5));
            }
        }

        CompletableFuture<CommitVerdict> rejected = invalid;
        var error = assertThrows(InvalidRequestException.class, () -> await(rejected));
        assertEquals("INVALID_FIELD", error.reason());
        verdicts.forEach(verdict -> assertTrue(await(verdict).isCommitted()));
        assertEquals(60, await(client.streams().describe(streamId)).orElseThrow().endOffset());
    }

    @Test
    void aCompactionOfStreamObjectsReplacesThem() {
        long streamId = await(session.streams().create(Map.of()));
        await(session.streams().open(new StreamToOpen(streamId, 3)));
        PreparedObjects prepared = await(session.objects().prepare(3, TIME_TO_COMMIT));
        long first = prepared.firstObjectId();
        for (int number = 0; number < 2; number++) {
            StreamSlice slice = new StreamSlice(streamId, 3, number * 5L, number * 5L + 5);
            await(session.objects().commit(Commit.ofStreamObjects()
                            .streamObject(new NewStreamObject(first + number, slice, ObjectFacts.ofSize(10)))
                            .build()))
                    .requireCommitted("object " + (first + number));
        }

        var result = new StreamObjectCommit.Result(first + 2, new OffsetRange(0, 10), ObjectFacts.ofSize(20));
        List<StreamObjectCommit.Source> sources = List.of(
                new StreamObjectCommit.Source(first, StreamObjectCommit.Operation.DELETE),
                new StreamObjectCommit.Source(first + 1, StreamObjectCommit.Operation.DELETE));
        await(session.objects().commit(new StreamObjectCommit(streamId, 3, Optional.of(result), sources)))
                .requireCommitted("object " + (first + 2));

        StreamDescription stream =
                await(client.streams().describe(streamId, Streams.Include.STREAM_OBJECTS)).orElseThrow();
        assertEquals(
                List.of(new StreamDescription.StreamObject(first + 2, new OffsetRange(0, 10))),
                stream.streamObjects());
        StreamObject listed = await(client.objects()
                        .listStreamObjects(streamId, 5, OptionalLong.empty())
                        .toList())
                .get(0);
        assertEquals(first + 2, listed.objectId());
        assertEquals(20, listed.facts().size());
    }

    @Test
    void namedObjectsGoWithTheirOwner() {
        KeyValues keys = client.keyValues("owners");
        PreparedObjects prepared = await(session.objects().prepare(2, TIME_TO_COMMIT));
        ObjectOwner owner = new ObjectOwner.Key("owners", "segment");
        List<NamedObjectToCommit> objects = List.of(
                named(prepared.firstObjectId(), "segment/log", owner),
                named(prepared.firstObjectId() + 1, "segment/index", owner));

        assertThrows(KeyNotFoundException.class, () -> await(session.namedObjects().commit(objects)));
        await(keys.put("segment", new byte[] {1}));
        await(session.namedObjects().commit(objects));
        NamedObject found = await(client.namedObjects().describe("segment/log")).orElseThrow();
        assertEquals(owner, found.owner());
        assertEquals(Map.of("kind", "test"), found.metadata());
        assertEquals(2, await(client.namedObjects().list("segment/").toList()).size());

        await(session.namedObjects().delete(List.of("segment/index", "segment/absent")));
        await(keys.delete("segment"));
        assertEquals(List.of(), await(client.namedObjects().list("segment/").toList()));
    }

    @Test
    void theOwnerIsDeletedWithItsLastNamedObject() {
        KeyValues keys = client.keyValues("owners");
        await(keys.put("mine", new byte[1]));
        await(keys.put("other", new byte[1]));
        ObjectOwner.Key owner = new ObjectOwner.Key("owners", "mine");
        long first = await(session.objects().prepare(3, TIME_TO_COMMIT)).firstObjectId();
        await(session.namedObjects().commit(List.of(
                named(first, "mine/1", owner),
                named(first + 1, "mine/2", owner),
                named(first + 2, "other/1", new ObjectOwner.Key("owners", "other")))));

        assertFalse(await(session.namedObjects().deleteWithOwner(List.of(), owner)));
        assertFalse(await(session.namedObjects().deleteWithOwner(List.of("mine/1", "other/1"), owner)));
        assertTrue(await(session.namedObjects().deleteWithOwner(List.of("mine/2"), owner)));
        assertTrue(await(keys.get("mine")).isEmpty());
        assertEquals(List.of(), await(client.namedObjects().list("mine/").toList()));
        assertTrue(await(client.namedObjects().describe("other/1")).isPresent());

        long streamId = await(session.streams().create(Map.of()));
        long ofStream = await(session.objects().prepare(1, TIME_TO_COMMIT)).firstObjectId();
        await(session.namedObjects().commit(List.of(named(ofStream, "stream/1", new ObjectOwner.Stream(streamId)))));
        await(session.namedObjects().deleteAllOf(new ObjectOwner.Stream(streamId)));
        assertTrue(await(client.namedObjects().describe("stream/1")).isEmpty());
        await(session.namedObjects().deleteAllOf(new ObjectOwner.Key("owners", "other")));
    }

    @Test
    void anUnregisteredNodeIsRejected() {
        BrokerSession other = await(client.openSession(new NodeIdentity(2, 1), SessionOptions.DEFAULT));
        await(other.unregister());
        var error = assertThrows(NodeNotRegisteredException.class, () -> await(other.streams().create(Map.of())));
        assertEquals("NODE_EPOCH_NOT_EXIST", error.reason());
        assertFalse(error.isRetriable());
    }

    private static NamedObjectToCommit named(long objectId, String name, ObjectOwner owner) {
        return new NamedObjectToCommit(objectId, name, 5, OptionalLong.empty(), owner, Map.of("kind", "test"));
    }

    private static Commit upload(long objectId, long streamId, long start, long end) {
        return Commit.of(objectId, ObjectFacts.ofSize(1000).withTimestamps(1, 2).withCrc32c(7))
                .range(new StreamSlice(streamId, 1, start, end))
                .build();
    }
}
