package io.streammeta.client.errors;

import java.util.Map;
import java.util.function.Function;

/**
 * Outcome of one item of a request. The names are those of the contract's {@code ErrorCode}, without the prefix, and
 * each has an exception of its own.
 */
public enum ErrorCode {
    /** Success. */
    NONE(null),
    /** The item contradicts itself. */
    INVALID_REQUEST(InvalidRequestException::new),
    /** No stream has this id. */
    STREAM_NOT_EXIST(StreamNotFoundException::new),
    /** Another owner, or a newer stream epoch, owns the stream. */
    STREAM_FENCED(StreamFencedException::new),
    /** The object id was never prepared, or its object expired. */
    OBJECT_NOT_EXIST(ObjectExpiredException::new),
    /** The stream is closed. */
    STREAM_NOT_OPENED(StreamNotOpenedException::new),
    /** The stream is open, or has pending uploads of its former owner. */
    STREAM_NOT_CLOSED(StreamNotClosedException::new),
    /** A source of a compaction no longer exists. */
    COMPACTED_OBJECTS_NOT_FOUND(CompactedObjectsNotFoundException::new),
    /** The range does not continue at the stream's end offset. */
    OFFSET_NOT_MATCHED(OffsetMismatchException::new),
    /** A newer process of the node has registered, or another one with its epoch. */
    NODE_EPOCH_EXPIRED(NodeEpochExpiredException::new),
    /** The node has not registered. */
    NODE_EPOCH_NOT_EXIST(NodeNotRegisteredException::new),
    /** A condition of a put or a delete found another version. */
    KEY_EXIST(KeyConflictException::new),
    /** No such key. */
    KEY_NOT_EXIST(KeyNotFoundException::new),
    /** Another node recovers the node's streams. */
    NODE_FENCED(NodeFencedException::new),
    /** The previous owner is locked, and only it may open the stream. */
    NODE_LOCKED(NodeLockedException::new),
    /** The object exists but is not committed. */
    OBJECT_NOT_COMMITTED(ObjectNotCommittedException::new),
    /** Stream and range disagree with the request's epoch. */
    STREAM_INNER_ERROR(StreamEpochMismatchException::new),
    /** The object id was committed before, with other content. */
    OBJECT_CONTENT_MISMATCH(ObjectContentMismatchException::new),
    /** The stream is shared and must be owned, or the other way round. */
    STREAM_KIND_MISMATCH(StreamKindMismatchException::new),
    /** The producer's batch was committed before. */
    DUPLICATE_BATCH(DuplicateBatchException::new),
    /** The batch does not continue its producer's sequence. */
    OUT_OF_ORDER_SEQUENCE(OutOfOrderSequenceException::new),
    /** A newer epoch of the producer has written to the stream. */
    PRODUCER_FENCED(ProducerFencedException::new),
    /** Another shared row of the stream was rejected, and this one with it. */
    STREAM_ROWS_REJECTED(StreamRowsRejectedException::new),
    /** The row was committed before, but its offsets are no longer known. */
    OFFSETS_UNKNOWN(OffsetsUnknownException::new),
    /** A code that this version of the client does not know. The item was rejected. */
    UNKNOWN(ProtocolViolationException::new);

    private final Function<Rejection, RejectedException> exception;

    ErrorCode(Function<Rejection, RejectedException> exception) {
        this.exception = exception;
    }

    /** Returns whether the item succeeded. */
    public boolean isSuccess() {
        return this == NONE;
    }

    /** Returns the exception of a rejected item, such as {@code "stream 7"}. */
    public RejectedException rejection(String subject) {
        if (isSuccess()) {
            throw new IllegalStateException(subject + " was not rejected");
        }
        return exception.apply(new Rejection(subject, this, name(), "", Map.of()));
    }
}
