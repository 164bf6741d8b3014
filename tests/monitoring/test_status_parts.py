"""Parts of the status page: alarms, brokers that are silent, and channels to other controllers."""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.controller.lifecycle.broker_sessions import Heard, NodeState
from streammeta.controller.metadata.api.answers import NodeDescription
from streammeta.controller.monitoring.pages.pages import _NODE_COLUMNS, _table
from streammeta.controller.monitoring.pages.templating import as_id, cell, in_age, new_environment
from streammeta.controller.monitoring.status import peer_status as module
from streammeta.controller.monitoring.status.alarms import BROKERS_NAMED, alarms
from streammeta.controller.monitoring.status.peer_status import PeerStatusClient
from streammeta.controller.monitoring.status.status import _silent, node_fields
from streammeta.controller.rpc.services.routes import LeaderView

VOTER = {"node_id": 1, "last_caught_up_age_ms": 0}
CONTROLLER = {
    "node_id": 1,
    "votes": True,
    "answers": True,
    "reason": "",
    "disk_full": False,
    "repairing": False,
}
SILENT = {"node_id": 1007, "since_s": 940.0, "is_exact": True, "owes": "it has streams open"}
SOUND: dict[str, Any] = {
    "at_s": 1_000.0,
    "quorum": {"has_leader": True, "voters": [VOTER]},
    "controllers": [{**CONTROLLER, "node_id": node_id} for node_id in (1, 2, 3)],
    "bucket": {"problem": "", "lease_s": 20.0},
    "deletions": {"stuck": 0, "ahead": 0},
    "brokers": {"sessions": {"active": 3, "fenced": 1}, "silent": []},
    "reconcile": {"missing": 0},
    "backup": {"problem": "", "behind_s": 2.0},
    "certificates": [{"plane": "http", "not_after_s": 1_000.0 + 15 * 86_400}],
    "process": {"memory_bytes": 10, "memory_limit_bytes": 100, "audit_failing": False},
}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the sound document with one value changed, e.g. at `quorum.voters.0.node_id`."""
    document = copy.deepcopy(SOUND)
    place: Any = document
    *parents, last = path.split(".")
    for part in parents:
        place = place[int(part) if part.isdigit() else part]
    place[last] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("quorum.has_leader", False, ("critical", "no_leader")),
        ("quorum.voters.0.last_caught_up_age_ms", 31_000, ("warning", "voter_behind")),
        ("controllers.2.answers", False, ("warning", "controller_silent")),
        ("controllers.1.disk_full", True, ("critical", "disk_full")),
        ("controllers.1.repairing", True, ("warning", "repairing")),
        ("bucket.problem", "another cluster's", ("critical", "bucket")),
        ("bucket.lease_s", 14.0, ("critical", "lease")),
        ("deletions.stuck", 3, ("warning", "deletions_stuck")),
        ("deletions.ahead", 3, ("warning", "objects_ahead")),
        ("brokers.silent", [SILENT], ("warning", "brokers_fenced")),
        ("reconcile.missing", 2, ("critical", "objects_missing")),
        ("backup.problem", "away", ("critical", "backup_failing")),
        ("backup.behind_s", 301.0, ("warning", "backup_late")),
        ("process.memory_bytes", 91, ("warning", "memory")),
        ("process.audit_failing", True, ("critical", "audit_failing")),
        ("certificates.0.not_after_s", 2_000.0, ("warning", "certificate")),
        ("certificates.0.not_after_s", 999.0, ("critical", "certificate")),
    ],
)
def test_each_condition_has_its_alarm_alone(
    path: str, value: object, told: tuple[str, str]
) -> None:
    assert alarms(SOUND) == []
    assert [alarm[:2] for alarm in alarms(changed(path, value))] == [told]


def test_without_a_majority_silence_is_critical() -> None:
    document = changed("controllers.2.answers", False)
    document["controllers"][0]["answers"] = False
    assert [alarm.severity for alarm in alarms(document)] == ["critical", "critical"]


def test_without_a_backup_none_is_late() -> None:
    assert alarms({**SOUND, "backup": None}) == []


def test_a_silent_broker_is_named_with_the_time_and_a_link() -> None:
    (alarm,) = alarms(changed("brokers.silent", [SILENT]))
    assert alarm.text == (
        "Broker 1007 has been silent since 1970-01-01 00:15:40 UTC, and is fenced: it has streams"
        " open."
    )
    assert alarm.path == "/nodes?after=1006"
    (older,) = alarms(changed("brokers.silent", [{**SILENT, "node_id": 1, "is_exact": False}]))
    assert "Broker 1 has been silent since before 1970-01-01 00:15:40 UTC" in older.text
    assert older.path == "/nodes"


def test_many_silent_brokers_are_named_up_to_a_bound_and_counted() -> None:
    found = alarms(changed("brokers.silent", [{**SILENT, "node_id": 1 + at} for at in range(40)]))
    assert len(found) == BROKERS_NAMED + 1
    assert found[-1].text == f"{40 - BROKERS_NAMED} more brokers are silent, and fenced."


NODE: dict[str, Any] = {
    "node_id": 1007,
    "node_epoch": 3,
    "failover": False,
    "wal_config": "",
    "tags": (),
    "has_opening_streams": True,
    "stream_set_object_count": 0,
    "stream_set_objects": (),
    "locked": False,
    "pending_upload_count": 0,
    "recovered_by": -1,
    "departed": False,
    "supervised": True,
}


def view_of(heard: Heard | None, state: NodeState = NodeState.FENCED) -> LeaderView:
    return LeaderView(lambda _: state, lambda _: -1, lambda _: heard)


def silent(view: LeaderView, **changes: object) -> list[dict[str, Any]]:
    node = NodeDescription(**{**NODE, **changes})
    known = SimpleNamespace(nodes=[node], parts=SimpleNamespace(view=view))
    return list(_silent(known, 1_000.0))  # type: ignore[arg-type]


HEARD = Heard(60_000, is_exact=True, has_closed=False)


def test_a_fenced_broker_that_holds_something_is_silent_since_its_last_heartbeat() -> None:
    assert silent(view_of(HEARD)) == [
        {"node_id": 1007, "since_s": 940.0, "is_exact": True, "owes": "it has streams open"}
    ]
    (owing,) = silent(view_of(HEARD), pending_upload_count=2)
    assert owing["owes"] == "2 of its uploads are missing"
    (recovered,) = silent(view_of(HEARD), recovered_by=8)
    assert recovered["owes"] == "broker 8 recovers its data"


@pytest.mark.parametrize(
    ("view", "changes"),
    [
        (view_of(Heard(60_000, is_exact=True, has_closed=True)), {}),  # closed in good order
        (view_of(HEARD), {"has_opening_streams": False}),  # closed its streams before
        (view_of(HEARD, NodeState.ACTIVE), {}),
        (view_of(None, NodeState.UNKNOWN), {}),
        (view_of(HEARD), {"departed": True}),
    ],
)
def test_a_broker_that_nobody_waits_for_raises_no_alarm(
    view: LeaderView, changes: dict[str, object]
) -> None:
    assert silent(view, **changes) == []


def test_the_table_of_brokers_has_the_last_heartbeat_and_ids_as_they_are_written() -> None:
    node = NodeDescription(**{**NODE, "recovered_by": 2008})
    active = node_fields(node, view_of(HEARD, NodeState.ACTIVE))
    older = node_fields(node, view_of(Heard(60_000, is_exact=False, has_closed=False)))
    _, _, (row, old_row) = _table("Brokers", [active, older], _NODE_COLUMNS)
    assert list(row[:3]) == ["1007", "active", "60 s ago"]
    assert "2008" in row
    assert old_row[2] is None  # it was not heard in this term


@pytest.mark.parametrize(
    ("age_ms", "text"),
    [
        (None, None),
        (0, "0 s ago"),
        (119_999, "119 s ago"),
        (120_000, "2 min ago"),
        (7_200_000, "2 h ago"),
        (172_800_000, "2 d ago"),
    ],
)
def test_ages_are_for_people(age_ms: int | None, text: str | None) -> None:
    assert in_age(age_ms) == text


def test_amounts_have_groups_of_digits_and_ids_have_none() -> None:
    assert cell(1_007) == "1\u202f007"
    assert cell(as_id(1_007)) == "1007"


def test_cells_name_their_column_where_the_heads_have_no_room() -> None:
    parts = new_environment().get_template("parts.html").module
    text = str(parts.table("Voters", ("controller", "lag"), [("1", 5)]))  # type: ignore[attr-defined]
    assert '<td data-head="controller">1</td>' in text
    assert '<td data-head="lag" class="n">5</td>' in text


class Channel:
    """A channel that answers nothing, and takes some turns to close."""

    made: list[Channel]

    def __init__(self, *_: Any) -> None:
        self.closes = 0
        type(self).made.append(self)

    async def close(self) -> None:
        self.closes += 1
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    Channel.made = []

    class Stub:
        def __init__(self, channel: Channel) -> None:
            self._channel = channel

        async def DescribeQuorum(self, *_: Any, **__: Any) -> str:  # noqa: N802
            await asyncio.sleep(0)
            assert not self._channel.closes
            return "a view"

    monkeypatch.setattr(module, "client_channel", Channel)
    monkeypatch.setattr(module, "QuorumServiceStub", Stub)


@pytest.mark.usefixtures("asked")
async def test_requests_at_once_may_need_other_controllers() -> None:
    others = PeerStatusClient(lambda: None)
    await others.ask({1: "a", 2: "b", 3: "c"})
    found = await asyncio.gather(*(others.ask({4: "d"}) for _ in range(3)))
    assert [answers[4].view for answers in found] == ["a view"] * 3
    await others.close()
    assert [channel.closes for channel in Channel.made] == [1] * len(Channel.made)


@pytest.mark.usefixtures("asked")
async def test_a_renewed_certificate_leaves_no_channel_open() -> None:
    certificates: list[Any] = [None]
    others = PeerStatusClient(lambda: certificates[0])
    await others.ask({1: "a", 2: "b"})
    certificates[0] = object()
    await asyncio.gather(others.ask({1: "a"}), others.ask({1: "a"}))
    await others.close()
    assert [channel.closes for channel in Channel.made] == [1] * len(Channel.made)
