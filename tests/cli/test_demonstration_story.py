"""The demo succeeds only if everything it claims holds: whatever goes wrong fails a check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scripts.demonstration import steps
from scripts.demonstration.story import Bucket, MappedKeys, Reads, Story, summarize
from streammeta.cli.reconcile.reconcile_command import apply_command, plan_command

FOREIGN = "theirs"
ORPHAN = "orphan"
LIVE = {"a", "b"}

READS = Reads(rows=10, rows_again=10, rows_beside=3, failure_beside="")
BUCKET = Bucket(before=LIVE | {ORPHAN, FOREIGN}, after=LIVE | {FOREIGN}, foreign_key=FOREIGN)
MAPPED = MappedKeys(live=LIVE, known=LIVE | {"prepared"})


def story() -> Story:
    return Story(
        uploaded={1, 2, 3},
        compactions=2,
        failover_s=0.2,
        expired_deleted=1,
        refusal="NOT_YOUR_NODE",
        orphans={ORPHAN},
        brokers_done={0, 1},
    )


def test_a_good_run() -> None:
    figures, failed = summarize(story(), READS, BUCKET, MAPPED, (10, 4))
    assert failed == []
    assert figures["ok"] is True
    assert (figures["objects_before_compaction"], figures["objects_after_compaction"]) == (3, 2)
    assert (figures["orphans_deleted"], figures["live_deleted"]) == (1, 0)


@pytest.mark.parametrize(
    ("reads", "bucket", "mapped", "check"),
    [
        (replace(READS, rows=-1), BUCKET, MAPPED, "read back after compaction"),
        (replace(READS, rows_again=9), BUCKET, MAPPED, "after reconciliation"),
        (replace(READS, rows_beside=0), BUCKET, MAPPED, "while objects were compacted"),
        (replace(READS, failure_beside="stream 4 differs"), BUCKET, MAPPED, "stream 4 differs"),
        (READS, replace(BUCKET, after={"a", FOREIGN}), MAPPED, "exactly the orphans"),
        (READS, replace(BUCKET, after={"a", FOREIGN}), MAPPED, "every live object"),
        (READS, replace(BUCKET, after=LIVE), MAPPED, "except the foreign one"),
        (READS, replace(BUCKET, after=LIVE | {ORPHAN, FOREIGN}), MAPPED, "exactly the orphans"),
        (
            READS,
            replace(BUCKET, after=LIVE | {"left", FOREIGN}),
            MAPPED,
            "the metadata contains all keys",
        ),
        (READS, BUCKET, MappedKeys(LIVE | {"c"}, LIVE | {"c"}), "one object for each broker"),
    ],
)
def test_what_may_go_wrong(reads: Reads, bucket: Bucket, mapped: MappedKeys, check: str) -> None:
    figures, failed = summarize(story(), reads, bucket, mapped, (10, 4))
    assert figures["ok"] is False
    assert any(check in one for one in failed), failed


def test_a_broker_that_could_speak_for_another() -> None:
    _, failed = summarize(replace(story(), refusal=""), READS, BUCKET, MAPPED, (10, 4))
    assert failed == ["a broker may not act for another: "]


def test_the_demo_calls_reconcile_as_it_is() -> None:
    place = ["--store", "s3://b", "--connect", "h:1"]
    made = plan_command.make_context("plan", steps.reconcile_plan_words(place, "p")[2:])
    assert (made.params["unsafe_grace_ms"], made.params["max_share"]) == (0, 0.5)
    applied = apply_command.make_context("apply", steps.reconcile_apply_words(place, "p")[2:])
    assert (applied.params["yes"], applied.params["connect"]) == (True, ("h:1",))
