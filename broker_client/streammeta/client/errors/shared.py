"""Errors of shared streams and idempotent producers."""

from __future__ import annotations

from streammeta.client.errors.base import RejectedError


class SharedStreamsUnsupportedError(RejectedError):
    """The controllers know no shared streams, and created owned ones, which were deleted."""

    advice = (
        "shared streams need feature level 5: upgrade every controller, then run `streammeta"
        " features upgrade`"
    )


class StreamKindMismatchError(RejectedError):
    """The stream is shared and must be owned, or the other way round."""

    advice = (
        "a shared stream is never opened or closed: append with `client.stream(stream_id,"
        " shared=True)`. Open an owned stream with `client.open_stream(stream_id)`"
    )


class DuplicateBatchError(RejectedError):
    """The producer's batch was committed before. Its offset is no longer known."""

    advice = "continue with the next batch. This one is in the stream"


class OutOfOrderSequenceError(RejectedError):
    """The batch does not continue the sequence of its producer in the stream."""

    advice = "append the producer's missing batches first, or continue with a larger producer epoch"


class ProducerFencedError(RejectedError):
    """A larger epoch of the producer has written to the stream."""

    advice = "stop this producer: a newer one with its id replaces it"


class StreamRowsRejectedError(RejectedError):
    """Another batch of the stream in the same commit was rejected."""

    advice = "commit it again in another object"


class OffsetsUnknownError(RejectedError):
    """The records are committed, but their offsets are no longer known."""

    advice = "read the stream to find the records. Do not append them again"
