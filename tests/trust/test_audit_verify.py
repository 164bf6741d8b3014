"""`streammeta audit` finds changes of every kind; the leader alone moves a log's anchor."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from streammeta.cli.framework.output import run_cli
from streammeta.cli.root import cli
from streammeta.cli.security import audit_command
from streammeta.cli.security.audit_command import read_files
from streammeta.controller.monitoring.status.peer_status import Answer
from streammeta.controller.process import audit_log
from streammeta.controller.process.audit_log import AuditAnchors, read_heads
from streammeta.controller.trust.audit.check import Verified, split, verify
from streammeta.controller.trust.audit.lines import (
    NAMESPACE,
    Anchor,
    Chain,
    expected_lines,
    line_hash,
    read_anchor,
)
from streammeta.v1 import kv_pb2, quorum_pb2
from tests.server.rpc_server import CLUSTER_ID, Rpcs, serving
from tests.trust.audited_cluster import chained, line

Audit = Callable[..., tuple[int, dict[str, Any]]]
LINES = chained(30)
HEAD = line_hash(LINES[-1].rstrip(b"\n"))


def checked(*files: Sequence[bytes], expected: dict[int, str] | None = None) -> Verified:
    """Verify files of one controller."""
    (found,) = verify(
        [split(f"file-{index}", b"".join(lines)) for index, lines in enumerate(files)], expected
    )
    return found


def test_an_untouched_log_holds() -> None:
    found = checked(LINES)
    assert found.breaks == []
    assert (found.lines, found.first_seq, found.last_seq, found.head) == (30, 1, 30, HEAD)


def test_files_hold_together_in_any_order_and_from_any_line_on() -> None:
    assert checked(LINES[20:], LINES[:10], LINES[10:20]).breaks == []
    later = checked(LINES[12:])
    assert later.breaks == []
    assert later.first_seq == 13


@given(at=st.integers(0, 28), byte=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_at_its_line_or_the_next(at: int, byte: int, bit: int) -> None:
    spoilt = bytearray(LINES[at])
    spoilt[byte % (len(spoilt) - 1)] ^= 1 << bit
    found = checked([*LINES[:at], bytes(spoilt), *LINES[at + 1 :]])
    assert found.breaks
    assert at + 1 <= found.breaks[0].line <= at + 2 + bytes(spoilt).count(b"\n")


@given(at=st.integers(1, 28), count=st.integers(1, 5))
def test_lines_cut_out_are_named(at: int, count: int) -> None:
    count = min(count, 29 - at)
    found = checked([*LINES[:at], *LINES[at + count :]])
    assert found.breaks[0].line == at + 1
    assert f"missing before line {at + count + 1}" in found.breaks[0].problem


@given(st.data())
def test_lines_swapped_are_found(data: st.DataObject) -> None:
    one, other = sorted(
        data.draw(st.lists(st.integers(0, 29), min_size=2, max_size=2, unique=True))
    )
    swapped = list(LINES)
    swapped[one], swapped[other] = swapped[other], swapped[one]
    found = checked(swapped)
    assert found.breaks
    # A first line that follows another one begins a log that goes back further.
    assert one <= found.breaks[0].line - 1 <= max(one, 1) or one == 0


@given(at=st.integers(1, 30))
def test_a_line_put_in_is_found(at: int) -> None:
    forged = Chain(at, "ab" * 32).link(line(99))
    found = checked([*LINES[:at], forged, *LINES[at:]])
    assert found.breaks[0].line == at + 1


def test_a_line_of_another_log_of_the_same_controller_is_found() -> None:
    other = chained(30, chain=Chain(head="cd" * 32))
    found = checked([*LINES[:10], *other[10:20], *LINES[20:]])
    assert [break_.line for break_ in found.breaks] == [11, 21]


def test_a_missing_file_between_two_is_named() -> None:
    found = checked(LINES[:10], LINES[20:])
    assert [(break_.file, break_.line) for break_ in found.breaks] == [("file-1", 1)]
    assert "lines 11 to 20 are missing" in found.breaks[0].problem


def test_a_log_begun_anew_is_found() -> None:
    found = checked(LINES[:10], chained(5))
    assert "started again" in found.breaks[0].problem


def test_an_end_cut_off_shows_against_a_hash_from_elsewhere_alone() -> None:
    assert checked(LINES[:20]).breaks == []
    assert checked(LINES, expected={30: HEAD}).breaks == []
    (missing,) = checked(LINES[:20], expected={30: HEAD}).breaks
    assert "line 30, known from elsewhere" in missing.problem
    (changed,) = checked(LINES, expected={30: "0" * 64}).breaks
    assert changed.line == 30


def test_a_line_cut_short_by_the_end_of_a_process_is_no_break() -> None:
    torn = LINES[10][:40]
    unfinished = checked([*LINES[:10], torn])
    assert unfinished.breaks == []
    assert unfinished.torn == 1
    chain = Chain(10, line_hash(torn))
    goes_on = [chain.link(line(0, call="audit.start")), chain.link(line(1))]
    found = checked([*LINES[:10], torn + b"\n", *goes_on])
    assert found.breaks == []
    assert found.torn == 1


def test_a_torn_line_that_no_start_follows_is_a_break() -> None:
    torn = LINES[10][:40]
    goes_on = Chain(10, line_hash(torn)).link(line(1))
    found = checked([*LINES[:10], torn + b"\n", goes_on])
    assert [break_.line for break_ in found.breaks] == [11]


def test_a_finished_last_line_that_can_not_be_read_is_a_break() -> None:
    found = checked([*LINES[:10], b"overwritten\n"])
    assert [break_.line for break_ in found.breaks] == [11]
    assert found.torn == 0


def test_a_line_of_another_controller_is_found_though_it_is_linked_in() -> None:
    before = line_hash(LINES[9].rstrip(b"\n"))
    found = checked([*LINES[:10], Chain(10, before).link(line(99, node=4))])
    assert [(one.line, "of controller 4" in one.problem) for one in found.breaks] == [(11, True)]


def test_an_emptied_file_is_named() -> None:
    found = verify([split("a", b"".join(LINES)), split("b", b"")])
    assert [break_.file for chain in found for break_ in chain.breaks] == ["b"]


@pytest.mark.parametrize("begun", [b"", LINES[20][:40]])
def test_a_log_right_after_a_rotation_holds(begun: bytes) -> None:
    files = [split("audit.log", begun), split("audit.log.000000000020", b"".join(LINES[:20]))]
    for order in (files, files[::-1]):
        (found,) = verify(order)
        assert (found.breaks, found.last_seq, found.node) == ([], 20, 3)
    assert found.torn == bool(begun)
    cut = verify([split("audit.log", b"".join(LINES)), split("audit.log.000000000020", b"")])
    assert [break_.problem for chain in cut for break_ in chain.breaks] == ["the file is empty"]


def test_a_cut_end_is_told_by_its_anchor() -> None:
    hashes = {30: HEAD}
    files = [split("audit.log", b"".join(LINES))]
    assert [chain.breaks for chain in verify(files, anchored={3: hashes, 4: {7: HEAD}})] == [[]]
    for kept in (29, 20):
        (found,) = verify([split("audit.log", b"".join(LINES[:kept]))], anchored={3: hashes})
        assert "line 30, known from elsewhere, is not among" in found.breaks[0].problem
    (found,) = verify([split("audit.log", LINES[0][:40])], anchored={3: hashes})
    assert "no whole line" in found.breaks[0].problem
    (found,) = verify(files, anchored={3: {30: "0" * 64}})
    assert "line 30 is not the one known from elsewhere" in found.breaks[0].problem


def test_lines_that_the_controller_lost_are_counted() -> None:
    chain = Chain()
    lines = [chain.link(line(0), 2), chain.link(line(1)), chain.link(line(2), 3)]
    assert checked(lines).dropped == 5


def test_logs_of_several_controllers_are_chains_of_their_own() -> None:
    others = chained(3, node=1)
    files = [split("a", b"".join(LINES)), split("b", b"".join(others))]
    assert [(one.node, one.lines, one.breaks) for one in verify(files)] == [(1, 3, []), (3, 30, [])]
    mixed = checked([*LINES[:2], *others])
    assert mixed.breaks


# -- the commands


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str]) -> Audit:
    """Run a command; return its exit code and object."""

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        code = run_cli(cli, ["audit", *words, "--format", "json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_verify_tells_chains_and_exits_with_0(audit: Audit, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b"".join(LINES))
    code, answer = audit("verify", str(path), "--expect", f"30:{HEAD}")
    assert code == 0
    (chain,) = answer["chains"]
    assert chain["lines"] == 30
    assert chain["head"] == HEAD


def test_verify_names_file_and_line_and_exits_with_1(audit: Audit, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b"".join(LINES).replace(b"1005", b"1015", 1))
    code, answer = audit("verify", str(path))
    assert code == 1
    assert answer["error"]["code"] == "AUDIT_CHAIN"
    assert f"{path}:7: " in answer["error"]["message"]
    assert answer["breaks"][0]["line"] == 7


@pytest.mark.parametrize("words", [("nowhere.log",), (), (__file__, "--expect", "7")])
def test_verify_called_the_wrong_way_exits_with_2(audit: Audit, words: Sequence[str]) -> None:
    assert audit("verify", *words)[0] == 2


def test_show_selects_lines(audit: Audit, tmp_path: Path) -> None:
    path = tmp_path / "audit.log"
    path.write_bytes(b"".join(LINES))
    assert len(audit("show", str(path))[1]["lines"]) == 30
    assert audit("show", str(path), "--principal", "admin/bob")[1]["lines"] == []
    assert len(audit("show", str(path), "--call", "LockNode")[1]["lines"]) == 30
    assert audit("show", str(path), "--verdict", "DENIED")[1]["lines"] == []
    assert len(audit("show", str(path), "--since", "1d")[1]["lines"]) == 30


def test_files_that_are_full_while_they_are_read_are_read_too(tmp_path: Path) -> None:
    path, full = tmp_path / "audit.log", tmp_path / "audit.log.000000000010"
    full.write_bytes(b"".join(LINES[:10]))
    path.write_bytes(b"".join(LINES[20:]))
    after = tmp_path / "audit.log.000000000020"
    after.write_bytes(b"".join(LINES[10:20]))  # since the shell listed the files
    assert set(read_files([path, full])) == {path, full, after}
    assert set(read_files([path])) == {path}
    assert set(read_files([path], to_the_end=True)) == {path, after}


def test_verify_compares_the_ends_with_a_map(
    audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "audit.log"
    value = Anchor("c", 30, HEAD, 1).encoded()
    monkeypatch.setattr(audit_command, "_in_map", lambda _: ({"3": value}, "c"))
    path.write_bytes(b"".join(LINES))
    assert audit("verify", str(path), "--map", "m.checkpoint")[0] == 0
    path.write_bytes(b"".join(LINES[:-1]))
    assert audit("verify", str(path))[0] == 0
    code, answer = audit("verify", str(path), "--map", "m.checkpoint")
    assert (code, answer["error"]["code"]) == (1, "AUDIT_CHAIN")
    monkeypatch.setattr(audit_command, "_in_map", lambda _: ({"3": value}, "restored"))
    assert audit("verify", str(path), "--map", "m.checkpoint")[0] == 0


class Scene:
    """A leader that anchors the chains of controllers."""

    def __init__(self, rpcs: Rpcs) -> None:
        self.rpcs = rpcs
        self.chains: dict[int, Chain] = {}
        self.anchors = self.of(CLUSTER_ID)

    def of(self, cluster_id: str) -> AuditAnchors:
        return AuditAnchors(self.rpcs.controller, cluster_id, lambda: 1, self.heads)

    async def heads(self) -> Mapping[int, Chain]:
        return self.chains

    async def anchored(self) -> dict[int, dict[int, str]]:
        request = kv_pb2.ListKVsRequest(namespace=NAMESPACE)
        entries = (await self.rpcs.ask(request)).entries
        return expected_lines({entry.key: entry.value for entry in entries}, CLUSTER_ID)


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    async with serving() as rpcs:
        yield Scene(rpcs)


async def test_the_ends_of_chains_are_anchored_as_they_grow(scene: Scene) -> None:
    scene.chains = {1: Chain(5, "5" * 64), 2: Chain()}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {5: "5" * 64}}
    scene.chains = {1: Chain(9, "9" * 64), 2: Chain(1, "1" * 64)}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {9: "9" * 64}, 2: {1: "1" * 64}}
    end_offset = scene.rpcs.log.next_offset
    await scene.anchors.anchor()
    assert scene.rpcs.log.next_offset == end_offset, "nothing is written if nothing has grown"


async def test_a_chain_that_was_cut_does_not_take_its_anchor_back(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    await scene.anchors.anchor()
    scene.chains = {1: Chain(4, "4" * 64)}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {9: "9" * 64}}


async def test_a_restored_cluster_begins_its_anchors_anew(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    await scene.of("before").anchor()
    assert await scene.anchored() == {}
    scene.chains = {1: Chain(4, "4" * 64)}
    await scene.anchors.anchor()
    assert await scene.anchored() == {1: {4: "4" * 64}}


async def test_no_caller_changes_anchors(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    await scene.anchors.anchor()
    put = kv_pb2.PutKVsRequest(items=[kv_pb2.KVToPut(namespace=NAMESPACE, key="1", overwrite=True)])
    delete = kv_pb2.DeleteKVsRequest(keys=[kv_pb2.KVKey(namespace=NAMESPACE, key="1")])
    refused = ("INVALID_ARGUMENT", "INVALID_FIELD", {"field": "namespace"})
    assert await scene.rpcs.refusal("KVService/PutKVs", put) == refused
    assert await scene.rpcs.refusal("KVService/DeleteKVs", delete) == refused
    assert await scene.anchored() == {1: {9: "9" * 64}}


async def test_a_controller_that_does_not_lead_anchors_nothing(scene: Scene) -> None:
    scene.chains = {1: Chain(9, "9" * 64)}
    scene.rpcs.log.lose_leadership(truncate=False)
    with capture_logs() as logs:
        await scene.anchors.anchor()
    assert logs == []


async def test_a_defect_is_logged_and_anchoring_goes_on(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> Mapping[int, Chain]:
        asked.set()
        raise RuntimeError("a defect")

    monkeypatch.setattr(audit_log, "ANCHOR_INTERVAL_S", 0)
    asked = asyncio.Event()
    anchors = AuditAnchors(scene.rpcs.controller, CLUSTER_ID, lambda: 1, fail)
    with capture_logs() as logs:
        anchoring_task = asyncio.create_task(anchors.run())
        for _ in range(2):
            asked.clear()
            await asyncio.wait_for(asked.wait(), 60)
        anchoring_task.cancel()
    assert [line["reason"] for line in logs] == ["RuntimeError('a defect')"]


def test_a_controller_is_anchored_by_its_own_answer_alone() -> None:
    """An address that now leads to another controller would make verification fail for months."""

    def answer(node_id: int, cluster_id: str = CLUSTER_ID, seq: int = 9) -> Answer:
        view = quorum_pb2.DescribeQuorumResponse(
            cluster_id=cluster_id, node_id=node_id, audit_seq=seq, audit_hash=str(node_id) * 64
        )
        return Answer("c.example:9090", view)

    answers = {
        1: answer(1),
        2: answer(3),
        3: answer(3, "another"),
        4: answer(4, seq=0),
        5: Answer("c.example:9090", None, "silent"),
    }
    assert read_heads(answers, CLUSTER_ID) == {1: Chain(9, "1" * 64)}


@pytest.mark.parametrize("value", [b"", b"[]", b"{}", b'{"seq": 1}', b"[" * 100_000])
def test_a_value_of_others_is_no_anchor(value: bytes) -> None:
    assert read_anchor(value) is None
    assert expected_lines({"1": value}, CLUSTER_ID) == {}
