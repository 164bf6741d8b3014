"""`demo --brokers`: what is skipped where something is missing, and checks that fail."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.demonstration import stock_broker
from scripts.demonstration.stock_kafka import StockKafka
from scripts.demonstration.stock_story import Cleaning, Outcome, summarize
from scripts.demonstration.story import MappedKeys

LIVE = {"a", "b"}
OUTCOME = Outcome("4.4.0", rows=10, only_in_bucket=9, read_back=10, read_again=10, objects=2)
CLEANING = Cleaning("orphan", LIVE | {"orphan"}, LIVE, MappedKeys(LIVE, LIVE | {"prepared"}))


def checks(
    outcome: Outcome = OUTCOME, failover_s: float = 0.2, cleaning: Cleaning = CLEANING
) -> list[str]:
    figures, failed = summarize({"Kafka": outcome}, {}, failover_s, cleaning)
    assert figures["ok"] is not bool(failed)
    return failed


def test_figures_of_a_good_run() -> None:
    skipped = {"RocketMQ": "its jar is not built"}
    figures, failed = summarize({"Kafka": OUTCOME}, skipped, 0.2, CLEANING)
    assert failed == []
    assert (figures["kafka_rows_read_back"], figures["kafka_version"]) == (10, "4.4.0")
    assert (figures["orphans_deleted"], figures["live_deleted"], figures["ok"]) == (1, 0, True)
    assert figures["skipped"] == ["RocketMQ: its jar is not built"]


@pytest.mark.parametrize(
    ("outcome", "check"),
    [
        (replace(OUTCOME, only_in_bucket=5), "lost most of its local files"),
        (replace(OUTCOME, read_back=9), "was read from the bucket"),
        (replace(OUTCOME, read_again=9), "after reconciliation"),
    ],
)
def test_rows_that_are_missing(outcome: Outcome, check: str) -> None:
    (failed,) = checks(outcome)
    assert check in failed


@pytest.mark.parametrize(
    ("cleaning", "check"),
    [
        (replace(CLEANING, after=LIVE | {"orphan"}), "exactly the orphan"),
        (replace(CLEANING, after={"a"}), "exactly the orphan"),
        (replace(CLEANING, after={"a"}), "every live object"),
        (replace(CLEANING, after=LIVE | {"stray"}), "the metadata contains all keys"),
    ],
)
def test_keys_that_should_not_be_there_or_are_missing(cleaning: Cleaning, check: str) -> None:
    assert any(check in failed for failed in checks(cleaning=cleaning))


def test_a_leader_that_was_not_killed() -> None:
    assert checks(failover_s=-1.0) == ["the leader was killed and a write was acknowledged after"]


def test_what_set_up_could_not_provide_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stock_broker, "ROOT", tmp_path)
    assert StockKafka.find_missing() == "streammeta-kafka-tiered is not built"
    target = tmp_path / "clients/java/streammeta-kafka-tiered/target"
    target.mkdir(parents=True)
    (target / "streammeta-kafka-tiered-0.1.0-SNAPSHOT.jar").touch()
    assert StockKafka.find_missing() == "its artifacts are not fetched"
    released = tmp_path / "kafka_2.13-4.4.0.jar"
    fetched = tmp_path / ".java/kafka-broker-classpath"
    fetched.parent.mkdir()
    fetched.write_text(f"{released}\n")
    assert StockKafka.find_missing() == "its artifacts are not fetched"
    released.touch()
    assert StockKafka.find_missing() == ""
