"""What is known of an object's content travels with its upload; what is not takes no bytes."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from streammeta.client.commit_messages import CommitMessage, PendingUpload, Upload
from streammeta.v1.common_pb2 import NodeIdentity
from streammeta.v1.objects_pb2 import CommitPipelineRequest, UploadColumns

NODE = NodeIdentity(node_id=1000, node_epoch=1)
PLAIN = Upload(1, 100, [5], [0], [10], [1])


def sent(*uploads: Upload) -> UploadColumns:
    """Return what a message of these uploads says in the words of the contract."""

    async def encode() -> bytes:
        done = asyncio.get_running_loop().create_future
        pending = [PendingUpload.of(one, done(), 1.0) for one in uploads]
        return CommitMessage(1, uploads=pending).encode(NODE)

    return CommitPipelineRequest.FromString(asyncio.run(encode())).uploads


def test_uploads_with_and_without_facts_share_a_message() -> None:
    timed = replace(PLAIN, object_id=2, min_timestamp_ms=0, max_timestamp_ms=2**63 - 1)
    checked = replace(PLAIN, object_id=3, crc32c=2**32 - 1)
    columns = sent(PLAIN, timed, checked)
    assert list(columns.object_id) == [1, 2, 3]
    assert list(columns.min_timestamp_ms) == [-1, 0, -1]
    assert list(columns.max_timestamp_ms) == [-1, 2**63 - 1, -1]
    assert list(columns.crc32c) == [-1, -1, 2**32 - 1]


def test_what_is_not_known_of_any_upload_is_left_out() -> None:
    columns = sent(PLAIN, replace(PLAIN, object_id=2, crc32c=0))
    assert list(columns.crc32c) == [-1, 0]
    for name in ("min_timestamp_ms", "max_timestamp_ms"):
        assert not getattr(columns, name), name
    assert not sent(PLAIN).crc32c


@pytest.mark.parametrize(
    ("facts", "named"),
    [
        ({"min_timestamp_ms": 5}, "from 5 to -1 ms"),
        ({"max_timestamp_ms": 5}, "from -1 to 5 ms"),
        ({"min_timestamp_ms": 5, "max_timestamp_ms": 4}, "from 5 to 4 ms"),
        ({"min_timestamp_ms": -2, "max_timestamp_ms": 4}, "from -2 to 4 ms"),
        ({"min_timestamp_ms": 0, "max_timestamp_ms": 2**63}, "ms, wanted"),
        ({"crc32c": 2**32}, "CRC-32C 4294967296"),
        ({"crc32c": -2}, "CRC-32C -2"),
    ],
)
def test_what_no_controller_would_take_is_refused_before_it_is_sent(
    facts: dict[str, Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        replace(PLAIN, **facts)
