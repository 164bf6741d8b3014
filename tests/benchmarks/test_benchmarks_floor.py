"""The floor answers messages that two of three processes have flushed, by streams and by calls."""

import contextlib
from pathlib import Path

import pytest

from scripts.benchmarks import latency
from scripts.benchmarks.cluster import VOTERS
from scripts.benchmarks.commit_load import committer_of
from scripts.benchmarks.committer import Load
from scripts.benchmarks.floor import MESSAGE_BYTES

MESSAGES = 5


def sizes_of_logs(place: Path) -> list[int]:
    sizes = [path.stat().st_size for path in place.glob("floor-*.data")]
    assert len(sizes) == VOTERS
    return sizes


@pytest.mark.parametrize("way", ["floor-pipelined", "floor-unary"])
async def test_each_message_is_on_two_disks_when_it_is_answered(tmp_path: Path, way: str) -> None:
    with contextlib.ExitStack() as stack:
        member = await latency.serve_floor(stack, tmp_path / "floor")
        client = committer_of(way, Load(endpoint=member.endpoint, ranges=1, in_flight=1))
        await client.open()
        for number in range(1, MESSAGES + 1):
            await client.commit(0)
            sizes = sizes_of_logs(tmp_path)
            assert sorted(sizes)[1] == number * MESSAGE_BYTES
        await client.close()


def test_the_floor_accepts_one_message_at_a_time() -> None:
    with pytest.raises(ValueError, match="in_flight"):
        committer_of("floor-unary", Load(endpoint="", ranges=1, in_flight=2))
