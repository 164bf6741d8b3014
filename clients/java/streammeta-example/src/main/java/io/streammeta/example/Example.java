package io.streammeta.example;

import static io.streammeta.client.StreammetaClient.await;
import static java.nio.charset.StandardCharsets.UTF_8;

import io.streammeta.client.BrokerSession;
import io.streammeta.client.Commit;
import io.streammeta.client.NodeIdentity;
import io.streammeta.client.ObjectFacts;
import io.streammeta.client.PreparedObjects;
import io.streammeta.client.SessionOptions;
import io.streammeta.client.StreamSlice;
import io.streammeta.client.StreamToOpen;
import io.streammeta.client.StreammetaClient;
import io.streammeta.store.ObjectKeys;
import io.streammeta.store.ObjectStore;
import java.nio.ByteBuffer;
import java.time.Duration;
import java.util.Map;
import java.util.OptionalLong;

/** A broker that writes one object, and finds it again. Arguments: an endpoint, and the address of the bucket. */
public final class Example {
    private Example() {}

    /** Runs the example. */
    public static void main(String[] arguments) {
        String endpoint = arguments[0];
        String bucket = arguments[1];
        NodeIdentity node = new NodeIdentity(1, System.currentTimeMillis());

        try (StreammetaClient client = StreammetaClient.builder().endpoints(endpoint).build();
                BrokerSession session = await(client.openSession(node, SessionOptions.DEFAULT));
                ObjectStore store = ObjectStore.open(bucket)) {
            long streamId = await(session.streams().create(Map.of("topic", "example")));
            await(session.streams().open(new StreamToOpen(streamId, 1)));

            // The bytes come first: a committed object is in the bucket.
            byte[] data = "ten records".getBytes(UTF_8);
            PreparedObjects prepared = await(session.objects().prepare(1, Duration.ofMinutes(10)));
            String namespace = await(client.describeCluster()).objectNamespace();
            store.put(ObjectKeys.of(namespace, prepared.firstObjectId()), ByteBuffer.wrap(data));

            Commit commit = Commit.of(prepared.firstObjectId(), ObjectFacts.ofSize(data.length))
                    .range(new StreamSlice(streamId, 1, 0, 10))
                    .build();
            await(session.pipeline().submit(commit)).requireCommitted("ten records");

            var found = await(client.objects().locate(streamId, 0, OptionalLong.empty(), 10));
            System.out.println("stream " + streamId + " has its records 0 to 9 in object "
                    + found.objects().get(0).objectId());
        }
    }
}
