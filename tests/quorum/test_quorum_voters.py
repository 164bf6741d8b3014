"""Any majority of a voter set meets any majority of the one that follows it."""

from itertools import combinations

import pytest

from streammeta.controller.errors import InvariantError
from streammeta.controller.ids import DirectoryId, EndOffset, Epoch, NodeId
from streammeta.controller.quorum import messages
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterHistory, VoterSet, majority


def voter(node: int, disk: str | None = "d") -> Voter:
    directory = None if disk is None else DirectoryId(f"{disk}{node}")
    return Voter(ReplicaKey(NodeId(node), directory), f"n{node}:1")


def voters(*nodes: int) -> VoterSet:
    return VoterSet(tuple(voter(node) for node in nodes))


def majorities(nodes: VoterSet) -> list[set[Voter]]:
    return [set(chosen) for chosen in combinations(nodes, majority(len(nodes)))]


@pytest.mark.parametrize("size", range(1, 6))
def test_sets_that_follow_each_other_have_majorities_that_meet(size: int) -> None:
    before = voters(*range(size))
    subsets = [
        voters(*nodes) for k in range(1, size + 3) for nodes in combinations(range(size + 2), k)
    ]
    followers = [after for after in subsets if after.follows(before)]
    assert before in followers
    assert len(followers) == 1 + 2 + (size if size > 1 else 0)
    for after in followers:
        for old in majorities(before):
            assert all(old & new for new in majorities(after)), (before, after)


def test_another_disk_is_another_voter_unless_the_first_was_not_known() -> None:
    pinned, unknown = VoterSet((voter(1),)), VoterSet((voter(1, None),))
    assert pinned.follows(unknown)
    assert not VoterSet((voter(1, "new"),)).follows(pinned)


def test_a_node_votes_once_in_a_set() -> None:
    with pytest.raises(ValueError, match="node ids"):
        voters(1, 2).with_voter(voter(2, "new"))


def control(base: int, *payloads: bytes) -> messages.Batch:
    return messages.Batch(EndOffset(base), Epoch(1), messages.BatchKind.CONTROL, payloads)


def test_voters_survive_their_record() -> None:
    named = VoterSet((voter(1), voter(2, None)))
    change = messages.encode_leader_change(NodeId(1), named, [NodeId(1)])
    assert messages.decode_voters(control(0, change, messages.encode_voters(named))) == named
    assert messages.decode_voters(control(0, change)) is None


def test_a_record_names_where_clients_reach_a_voter_once_that_is_known() -> None:
    """Records of voters that have not told it are as they always were."""
    told = Voter(ReplicaKey(NodeId(2), DirectoryId("d2")), "n2:1", "n2:2")
    untold, known = VoterSet((voter(1),)).with_voter(told).to_fields()
    assert untold == {"node_id": 1, "directory_id": "d1", "endpoint": "n1:1"}
    assert known["client_endpoint"] == "n2:2"
    named = voters(1).with_voter(told)
    assert messages.decode_voters(control(0, messages.encode_voters(named))) == named


@pytest.mark.parametrize(
    "payload", [b"{}", b"nonsense", b'{"type":"voters","version":9}', b'{"type":"voters"}', b"[]"]
)
def test_a_record_that_cannot_be_read_is_not_passed_over(payload: bytes) -> None:
    with pytest.raises(InvariantError, match="offset 7"):
        messages.decode_voters(control(7, payload))


def test_the_set_in_force_is_the_last_one_in_the_log() -> None:
    history = VoterHistory(voters(1), EndOffset(0))
    history.append(EndOffset(5), voters(1, 2))
    history.append(EndOffset(9), voters(1, 2, 3))
    assert [len(history.at(EndOffset(end))) for end in (0, 4, 5, 8, 9, 99)] == [1, 1, 2, 2, 3, 3]
    history.trim(EndOffset(6))
    assert history.at(EndOffset(6)) == voters(1, 2)
    history.truncate(EndOffset(8))
    assert (history.latest, history.latest_end) == (voters(1, 2), 5)


def test_sets_in_the_log_differ_by_one() -> None:
    history = VoterHistory(voters(1), EndOffset(3))
    with pytest.raises(InvariantError, match="more than one"):
        history.append(EndOffset(5), voters(1, 2, 3))
