"""Brokers on the status page: who is silent, since when, and when each was heard."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from streammeta.controller.lifecycle.broker_sessions import Heard, NodeState
from streammeta.controller.metadata.api.answers import NodeDescription
from streammeta.controller.monitoring.pages.pages import _node_row
from streammeta.controller.monitoring.pages.templating import as_id, cell, in_age, new_environment
from streammeta.controller.monitoring.status.status import _silent, node_fields
from streammeta.controller.rpc.services.routes import LeaderView

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
    return list(_silent(SimpleNamespace(nodes=[node], view=view), 1_000.0))  # type: ignore[arg-type]


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
    row = _node_row(node_fields(node, view_of(HEARD, NodeState.ACTIVE)))
    assert row[:3] == ("1007", "active", "60 s ago")
    assert "2008" in row
    older = node_fields(node, view_of(Heard(60_000, is_exact=False, has_closed=False)))
    assert _node_row(older)[2] is None  # it was not heard in this term


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
