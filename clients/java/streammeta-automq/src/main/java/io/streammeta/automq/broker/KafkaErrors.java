package io.streammeta.automq.broker;

import io.streammeta.automq.HostErrors;
import io.streammeta.client.errors.ErrorCode;
import io.streammeta.client.errors.RejectedException;
import java.util.Set;
import org.apache.kafka.common.protocol.Errors;

/**
 * Rejections as the exceptions of AutoMQ's Kafka. The broker halts when its node is fenced, and gives up a stream that is
 * fenced.
 */
final class KafkaErrors implements HostErrors {
    private static final Set<ErrorCode> KNOWN = Set.of(
            ErrorCode.STREAM_NOT_EXIST,
            ErrorCode.STREAM_FENCED,
            ErrorCode.STREAM_NOT_OPENED,
            ErrorCode.STREAM_NOT_CLOSED,
            ErrorCode.OFFSET_NOT_MATCHED,
            ErrorCode.NODE_EPOCH_EXPIRED,
            ErrorCode.NODE_EPOCH_NOT_EXIST,
            ErrorCode.NODE_FENCED,
            ErrorCode.NODE_LOCKED,
            ErrorCode.STREAM_INNER_ERROR);

    @Override
    public RuntimeException translate(RejectedException rejection) {
        if (!KNOWN.contains(rejection.code())) {
            return rejection;
        }
        RuntimeException error = Errors.valueOf(rejection.code().name()).exception(rejection.getMessage());
        error.addSuppressed(rejection);
        return error;
    }
}
