package io.streammeta.automq;

import static io.streammeta.automq.Node.get;

import com.automq.stream.api.FetchResult;
import com.automq.stream.api.RecordBatchWithContext;
import com.automq.stream.api.Stream;
import com.automq.stream.s3.operator.AwsObjectStorage;
import com.automq.stream.s3.operator.BucketURI;
import com.automq.stream.s3.operator.ObjectStorage;
import java.util.List;
import java.util.function.Consumer;

/** A stream of AutoMQ's s3stream, with its write-ahead log in the same bucket. */
final class S3streamLog implements NodeProcess.Opener {
    private static final int FETCH_BYTES = 1 << 20;

    @Override
    public NodeProcess.Log open(List<String> endpoints, String bucket, long streamId, long epoch) {
        ObjectStorage storage =
                AwsObjectStorage.builder().bucket(BucketURI.parse("0@" + bucket)).build();
        S3streamNode node = S3streamNode.open(endpoints, storage, NodeProcess.NODE_ID);
        Stream stream = streamId < 0 ? node.create() : node.open(streamId, epoch);
        return new NodeProcess.Log() {
            @Override
            public long streamId() {
                return stream.streamId();
            }

            @Override
            public void append(byte[] message) {
                get(stream.append(Batches.of(message)));
            }

            @Override
            public void upload() {
                node.upload(stream);
            }

            @Override
            public void read(Consumer<byte[]> reader) {
                long offset = stream.startOffset();
                while (offset < stream.nextOffset()) {
                    FetchResult result = get(stream.fetch(offset, stream.nextOffset(), FETCH_BYTES));
                    for (RecordBatchWithContext batch : result.recordBatchList()) {
                        byte[] bytes = new byte[batch.rawPayload().remaining()];
                        batch.rawPayload().duplicate().get(bytes);
                        reader.accept(bytes);
                        offset = batch.lastOffset();
                    }
                    result.free();
                }
            }
        };
    }
}
