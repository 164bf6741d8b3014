"""Story of `demo --brokers`: stock brokers lose a controller and their files, and nothing is lost.

Apache Kafka and RocketMQ write to one bucket, which is reconciled while both use it.
"""

import asyncio
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from typing import TypeVar

from scripts.demonstration import steps
from scripts.demonstration.dataset import NAMES, load
from scripts.demonstration.stage import Stage
from scripts.demonstration.stock_broker import StockBroker
from scripts.demonstration.stock_kafka import StockKafka
from scripts.demonstration.stock_rocketmq import StockRocketmq
from scripts.demonstration.story import MappedKeys
from streammeta.cli.framework.client import CallError
from streammeta.cli.quorum.features_command import change_level
from streammeta.client.parts import BrokerSession
from streammeta.controller.features import SUPPORTED
from streammeta.reconcile.engines.java_runtime import find_java_home
from streammeta.reconcile.vocabulary.errors import ConfigurationError

KINDS: Sequence[type[StockBroker]] = (StockKafka, StockRocketmq)
KILL_SHARE = 0.3
"""Share of the rows after which the leader is killed, while the brokers write the others."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Rows of one broker: written, found only in the bucket, read from there, and read again."""

    version: str
    rows: int
    only_in_bucket: int
    read_back: int
    read_again: int
    objects: int


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Keys of the bucket before and after reconciliation, and those of the metadata after it."""

    orphan: str
    before: set[str]
    after: set[str]
    mapped: MappedKeys


class StockBrokersDemo:
    """Run from an empty bucket to the summary. A broker that can't be had is skipped."""

    OPTIONS = ("--delete-delay-ms", "1000")

    def __init__(self, _: Namespace, stage: Stage) -> None:
        self._stage = stage
        self._brokers: list[StockBroker] = []

    def stop(self) -> None:
        """End the brokers."""
        for broker in self._brokers:
            broker.stop()

    def run(self) -> tuple[dict[str, object], list[str]]:
        """Play the whole story, and return its figures and the failed checks."""
        say = self._stage.narrator.step
        skipped = self._find_brokers()
        for name, reason in skipped.items():
            say(f"{name} is skipped: {reason}")
        if not self._brokers:
            return {"skipped": _reasons(skipped), "ok": True}, []
        self._stage.start_controllers()
        self._raise_level()
        self._all(lambda broker: broker.start())
        say(f"stock brokers with plug-ins: {', '.join(map(str, self._brokers))}")

        failover_s = self._write()
        gone = self._all(lambda broker: broker.lose_local_files())
        for name, count in gone.items():
            say(f"{name}'s local files are deleted: {count:,} rows are in the bucket alone")
        read = self._read_back("from the bucket")
        objects = self._all(lambda broker: len(broker.objects()))

        orphan = self._plant_orphan()
        before = self._stage.keys_of_objects()
        self._stage.reconcile()
        cleaning = Cleaning(
            orphan, before, self._stage.keys_of_objects(), self._stage.mapped_keys()
        )
        again = self._read_back("after reconciliation")
        outcomes = {
            broker.name: Outcome(
                version=broker.version,
                rows=len(broker.rows),
                only_in_bucket=gone[broker.name],
                read_back=read[broker.name],
                read_again=again[broker.name],
                objects=objects[broker.name],
            )
            for broker in self._brokers
        }
        return summarize(outcomes, skipped, failover_s, cleaning)

    def _raise_level(self) -> None:
        """Bring the new cluster to the newest feature level, which the plug-ins need."""

        def is_raised() -> bool:
            with self._stage.callers.admin.operator() as client:
                try:
                    change_level(client, SUPPORTED.highest)
                except CallError:
                    return False  # a controller has not connected yet
            return True

        steps.wait_until(is_raised, "the feature level is not raised", 30.0)

    def _find_brokers(self) -> Mapping[str, str]:
        """Make the brokers that can be had, and return the reasons of the others."""
        try:
            java_home = find_java_home()
        except ConfigurationError:
            return {kind.name: "there is no Java 17 or newer" for kind in KINDS}
        skipped = {kind.name: reason for kind in KINDS if (reason := kind.find_missing())}
        rows = [b"%d,%b" % (number, row) for number, (_, row) in enumerate(load(NAMES[0]).rows)]
        for kind in KINDS:
            if kind.name not in skipped:
                self._brokers.append(kind(self._stage, java_home, rows[: kind.row_count]))
        return skipped

    def _all(self, act: Callable[[StockBroker], T]) -> Mapping[str, T]:
        """Let all brokers act at the same time."""
        # Its threads do not outlive an interrupt.
        with ThreadPool() as pool:
            results = pool.map(act, self._brokers)
        return {broker.name: found for broker, found in zip(self._brokers, results, strict=True)}

    def _write(self) -> float:
        """Let the brokers write all rows, kill the leader meanwhile, and return the fail-over."""
        for broker in self._brokers:
            self._stage.narrator.step(f"{broker.name}'s own client sends {len(broker.rows):,} rows")
        self._all(lambda broker: broker.write(broker.rows[: _kill_at(broker)]))
        with ThreadPool(1) as pool:
            failover = pool.apply_async(self._stage.kill_leader)
            self._all(lambda broker: broker.write(broker.rows[_kill_at(broker) :]))
            failover_s = failover.get()
        self._stage.narrator.step("all rows are acknowledged")
        return failover_s

    def _read_back(self, when: str) -> Mapping[str, int]:
        read = self._all(lambda broker: broker.read_back())
        for name, count in read.items():
            self._stage.narrator.step(f"{name} is read {when}: {count:,} rows equal the source")
        return read

    def _plant_orphan(self) -> str:
        """Upload an object late, after its time to commit has ended, and return its key."""
        caller = self._stage.callers.broker(steps.CREATOR_NODE_ID)

        async def register() -> None:
            async with caller.client() as client:
                await BrokerSession.open(client, steps.CREATOR_NODE_ID, 1)

        asyncio.run(register())
        object_id = steps.prepare_object(caller, steps.CREATOR_NODE_ID, 1)
        steps.wait_until_removed(self._stage.callers.admin, [object_id])
        key = self._stage.key_of(object_id)
        steps.plant_foreign_key(self._stage.endpoint, key)
        self._stage.narrator.step(f"an upload arrives after its time to commit has ended: {key}")
        return key


def _kill_at(broker: StockBroker) -> int:
    return int(len(broker.rows) * KILL_SHARE)


def _reasons(skipped: Mapping[str, str]) -> list[str]:
    return [f"{name}: {reason}" for name, reason in skipped.items()]


def summarize(
    outcomes: Mapping[str, Outcome],
    skipped: Mapping[str, str],
    failover_s: float,
    cleaning: Cleaning,
) -> tuple[dict[str, object], list[str]]:
    """Return the figures and the failed checks."""
    checks: dict[str, bool] = {}
    figures: dict[str, object] = {}
    for name, found in outcomes.items():
        checks |= {
            f"{name} lost most of its local files": found.only_in_bucket > found.rows // 2,
            f"every row of {name} was read from the bucket": found.read_back == found.rows,
            f"every row of {name} still reads after reconciliation": found.read_again == found.rows,
        }
        figures |= {
            f"{name.lower()}_version": found.version,
            f"{name.lower()}_rows": found.rows,
            f"{name.lower()}_rows_only_in_bucket": found.only_in_bucket,
            f"{name.lower()}_rows_read_back": found.read_back,
            f"{name.lower()}_objects": found.objects,
        }
    deleted = cleaning.before - cleaning.after
    checks |= {
        "the leader was killed and a write was acknowledged after": failover_s > 0,
        "exactly the orphan was deleted": deleted == {cleaning.orphan},
        "the bucket has every live object": cleaning.mapped.live <= cleaning.after,
        "the metadata contains all keys": cleaning.after <= cleaning.mapped.known,
    }
    failed = [check for check, holds in checks.items() if not holds]
    figures |= {
        "failover_s": failover_s,
        "orphans_planted": 1,
        "orphans_deleted": len(deleted & {cleaning.orphan}),
        "live_deleted": len(deleted - {cleaning.orphan}),
        "skipped": _reasons(skipped),
        "ok": not failed,
    }
    return figures, failed
