package com.automq.stream.s3.streams;

import com.automq.stream.s3.metadata.StreamMetadata;

/** Shape of a listener to changes of a stream. */
public interface StreamMetadataListener {
    void onNewStreamMetadata(StreamMetadata metadata);

    interface Handle {
        void close();
    }
}
