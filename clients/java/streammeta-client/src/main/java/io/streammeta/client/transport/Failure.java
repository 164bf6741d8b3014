package io.streammeta.client.transport;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.protobuf.ProtoUtils;
import io.streammeta.client.errors.BucketRejectedException;
import io.streammeta.client.errors.ControllerDefectException;
import io.streammeta.client.errors.InvalidRequestException;
import io.streammeta.client.errors.LimitExceededException;
import io.streammeta.client.errors.MetadataOlderThanBucketException;
import io.streammeta.client.errors.PermissionDeniedException;
import io.streammeta.client.errors.RejectedException;
import io.streammeta.client.errors.Rejection;
import io.streammeta.client.errors.UnsupportedException;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;

/**
 * Status of a failed call.
 *
 * @param code the status code
 * @param message the message, for people
 * @param reason the reason of a controller, empty if none wrote the status
 * @param metadata the metadata of the reason
 * @param retryAfter the time before which the same request should not be sent again, zero if unspecified
 */
record Failure(Status.Code code, String message, String reason, Map<String, String> metadata, Duration retryAfter) {
    private static final String DOMAIN = "streammeta";
    private static final Metadata.Key<com.google.rpc.Status> DETAILS = Metadata.Key.of(
            "grpc-status-details-bin", ProtoUtils.metadataMarshaller(com.google.rpc.Status.getDefaultInstance()));

    /** Leader as a controller knows it. The endpoint is empty if it knows none. */
    record Hint(String endpoint, long epoch) {}

    static Failure of(Status.Code code, String message) {
        return new Failure(code, message, "", Map.of(), Duration.ZERO);
    }

    static Failure of(Throwable error) {
        Status status = Status.fromThrowable(error);
        Metadata trailers = Status.trailersFromThrowable(error);
        String cause = status.getCause() == null ? "" : ": " + status.getCause().getMessage();
        String message = status.getDescription() == null ? "" : status.getDescription();
        com.google.rpc.Status details = trailers == null ? null : trailers.get(DETAILS);
        if (details == null) {
            return of(status.getCode(), message + cause);
        }

        ErrorInfo info = ErrorInfo.getDefaultInstance();
        Duration retryAfter = Duration.ZERO;
        try {
            for (Any detail : details.getDetailsList()) {
                // Details of others, such as a proxy, have another domain.
                if (detail.is(ErrorInfo.class) && detail.unpack(ErrorInfo.class).getDomain().equals(DOMAIN)) {
                    info = detail.unpack(ErrorInfo.class);
                } else if (detail.is(RetryInfo.class)) {
                    var delay = detail.unpack(RetryInfo.class).getRetryDelay();
                    retryAfter = Duration.ofSeconds(delay.getSeconds(), delay.getNanos());
                }
            }
        } catch (InvalidProtocolBufferException error_) {
            return of(status.getCode(), message); // not written by a controller
        }
        return new Failure(status.getCode(), message, info.getReason(), info.getMetadataMap(), retryAfter);
    }

    /** Returns how the failure may be followed by another attempt, empty if it is final. */
    Optional<FailureKind> kind() {
        // A reason shows that a controller answered, a bare status may be gRPC's own.
        return Optional.ofNullable(
                switch (code) {
                    case UNAVAILABLE -> reason.equals("NOT_LEADER")
                            ? FailureKind.NOT_LEADER
                            : reason.isEmpty() ? FailureKind.UNREACHABLE : FailureKind.NOT_NOW;
                    case RESOURCE_EXHAUSTED -> isPermanentLimit() ? null : FailureKind.NOT_NOW;
                    case CANCELLED -> FailureKind.UNREACHABLE;
                    case DEADLINE_EXCEEDED -> FailureKind.TIMED_OUT;
                    case ABORTED -> reason.equals("OUTCOME_UNKNOWN") ? FailureKind.OUTCOME_UNKNOWN : null;
                    // Without a reason the transport wrote it, not a controller.
                    case INTERNAL, UNKNOWN -> reason.isEmpty() ? FailureKind.UNREACHABLE : null;
                    default -> null;
                });
    }

    private boolean isPermanentLimit() {
        // No reason comes from the transport, for the size of a message. Waiting makes no room in a full quota.
        return reason.isEmpty()
                || reason.equals("LIMIT_EXCEEDED")
                || (reason.equals("QUOTA_EXCEEDED") && retryAfter.isZero());
    }

    Optional<Hint> hint() {
        String epoch = metadata.getOrDefault("epoch", "");
        // Metadata comes from the network, so the epoch may be any text.
        if (!reason.equals("NOT_LEADER") || !epoch.matches("[0-9]{1,18}")) {
            return Optional.empty();
        }
        return Optional.of(new Hint(metadata.getOrDefault("leader_endpoint", ""), Long.parseLong(epoch)));
    }

    String text() {
        return (code.name() + " " + message).strip();
    }

    /** Returns the error of a permanently rejected call. */
    RejectedException rejection(String method) {
        Rejection rejection = new Rejection(method, null, reason, text(), metadata);
        return switch (reason) {
            case "WRONG_BUCKET", "SUPERSEDED" -> new BucketRejectedException(rejection);
            case "MAP_OLDER_THAN_BUCKET" -> new MetadataOlderThanBucketException(rejection);
            default -> switch (code) {
                case INVALID_ARGUMENT, OUT_OF_RANGE -> new InvalidRequestException(rejection);
                case RESOURCE_EXHAUSTED -> new LimitExceededException(rejection);
                case PERMISSION_DENIED, UNAUTHENTICATED -> new PermissionDeniedException(rejection);
                case UNIMPLEMENTED -> new UnsupportedException(rejection);
                case FAILED_PRECONDITION -> new RejectedException(rejection);
                default -> new ControllerDefectException(rejection);
            };
        };
    }
}
