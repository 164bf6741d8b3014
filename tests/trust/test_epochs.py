"""Epochs: no caller can choose one that can't be exceeded."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from streammeta.controller.errors import ErrorCode, InvalidRequestError
from streammeta.controller.metadata.api import requests
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.metadata.tables.epochs import FREE_MAX, STEP_MAX
from streammeta.controller.metadata.tables.values import INT64_MAX, NodeIdentity
from streammeta.controller.records import record as rec

NODE = NodeIdentity(1007, 1)
NANOSECONDS_IN_2100 = 4_102_444_800 * 10**9


def written(cluster_metadata: ClusterMetadata, request: requests.WriteRequest) -> ErrorCode:
    """Decide and replay a request; return its outcome."""
    offset = cluster_metadata.applied_end_offset
    decision = cluster_metadata.decide(request, 0, offset)
    cluster_metadata.apply(offset, decision.records)
    answer = decision.answer
    if isinstance(request, requests.OpenStreams):
        (stream,) = answer.streams  # type: ignore[attr-defined]
        answer = stream
    error: ErrorCode = answer.error  # type: ignore[attr-defined]
    return error


def with_stream() -> ClusterMetadata:
    cluster_metadata = ClusterMetadata()
    written(cluster_metadata, requests.RegisterNode(node=NODE))
    new = requests.CreateStreams(request_id="new", node=NODE, streams=(requests.NewStream(),))
    written(cluster_metadata, new)
    return cluster_metadata


def registration(epoch: int) -> requests.WriteRequest:
    return requests.RegisterNode(node=NodeIdentity(1007, epoch))


def recovery(epoch: int) -> requests.WriteRequest:
    return requests.GetOpeningStreams(node=NodeIdentity(1007, epoch))


def opening(epoch: int) -> requests.WriteRequest:
    return requests.OpenStreams(
        node=NodeIdentity(1007, INT64_MAX), streams=(requests.StreamToOpen(0, epoch),)
    )


@pytest.mark.parametrize("ask", [registration, recovery, opening])
def test_epochs_may_be_counters_and_times_of_any_unit(
    ask: Callable[[int], requests.WriteRequest],
) -> None:
    for epoch in (2, 1_763_000_000, 1_763_000_000_000, 1_763 * 10**15, NANOSECONDS_IN_2100):
        cluster_metadata = with_stream()
        assert written(cluster_metadata, ask(epoch)) is ErrorCode.NONE


@pytest.mark.parametrize("ask", [registration, recovery, opening])
def test_after_the_largest_epoch_that_is_taken_comes_a_larger_one(
    ask: Callable[[int], requests.WriteRequest],
) -> None:
    cluster_metadata = with_stream()
    before = cluster_metadata.state_hash()
    for epoch in (INT64_MAX, FREE_MAX + STEP_MAX + 1, FREE_MAX + 1):
        with pytest.raises(InvalidRequestError, match=f"{FREE_MAX}"):
            written(cluster_metadata, ask(epoch))
    assert cluster_metadata.state_hash() == before
    for epoch in (FREE_MAX, FREE_MAX + 1, FREE_MAX + 1 + STEP_MAX):
        assert written(cluster_metadata, close(ask(epoch), cluster_metadata)) is ErrorCode.NONE
    with pytest.raises(InvalidRequestError, match=f"{FREE_MAX + 1 + 2 * STEP_MAX}"):
        written(cluster_metadata, close(ask(INT64_MAX), cluster_metadata))


def close(
    request: requests.WriteRequest, cluster_metadata: ClusterMetadata
) -> requests.WriteRequest:
    """Return the request, with its stream closed if it is an opening."""
    if isinstance(request, requests.OpenStreams):
        asked = cluster_metadata.query(requests.DescribeStreams(stream_ids=(0,)))
        (stream,) = asked.streams  # type: ignore[attr-defined]
        if stream.epoch >= 0:
            epoch = requests.StreamToClose(0, stream.epoch)
            written_close = requests.CloseStreams(
                node=NodeIdentity(1007, INT64_MAX), streams=(epoch,)
            )
            offset = cluster_metadata.applied_end_offset
            cluster_metadata.apply(
                offset, cluster_metadata.decide(written_close, 0, offset).records
            )
    return request


def test_records_of_the_past_are_replayed_whatever_their_epoch() -> None:
    cluster_metadata = with_stream()
    record = rec.NodeEpochSet(node_id=1007, node_epoch=INT64_MAX, failover=False)
    cluster_metadata.apply(cluster_metadata.applied_end_offset, (record,))
    node = cluster_metadata.node(1007)
    assert node is not None
    assert node.node_epoch == INT64_MAX
