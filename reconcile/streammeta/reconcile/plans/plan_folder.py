"""Folder of a plan: its layout, atomic creation, reading, and admission to apply.

    plan.json      the compared cluster and bucket, the counts, the findings of the guards
    candidates/    Parquet: the keys that apply may delete
    verdicts/      Parquet: every key of the bucket and every missing object, with its verdict
    report.html    the findings for a browser
    losses/        Parquet: the confirmed ranges of streams in missing or damaged objects. Absent if
                   they could not be confirmed
    uploads/       Parquet: unfinished multipart uploads. Absent if they could not be listed
    map/           Parquet: the objects in the metadata that the listing was compared with
    listing/       Parquet: every key of the bucket. It replaces candidates, verdicts and map if the
                   metadata could not be copied
    runs/          a folder for each run that applied the plan, see `deletion`

A plan is built in a draft folder next to its own and renamed, so a folder with a plan.json is
complete. It contains no secrets: store URIs are written without credentials. Admission compares the
plan with the clock and the arguments of apply. `identity` checks controllers and bucket.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streammeta.reconcile.cluster.identity import ClusterIdentity, place_of
from streammeta.reconcile.vocabulary.errors import ConfigurationError, PlanError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import LOST, GuardResult, Verdict
from streammeta.storage import durable_files, parsing
from streammeta.storage.object_store.protocol.address import StoreAddress

FORMAT_VERSION = 2
PLAN_FILE = "plan.json"
REPORT_FILE = "report.html"
CANDIDATES = "candidates"
VERDICTS = "verdicts"
LOSSES = "losses"
UPLOADS = "uploads"
MAP = "map"
LISTING = "listing"
RUNS = "runs"
UNDO = "undo"
"""Subfolder of a run's folder with a record of each object before its change. May be absent."""

_TIMES = ("created_at_ms", "listing_started_ms", "young_from_ms")


@dataclass(frozen=True, slots=True)
class LostRange:
    """Offsets of a stream in a missing or damaged object, or None if it contains no range.

    `min_timestamp_ms` and `max_timestamp_ms` bound the times of its records, if known.
    """

    verdict: str
    key: str
    stream_id: int | None
    start_offset: int | None
    end_offset: int | None
    committed_ms: int
    min_timestamp_ms: int | None
    max_timestamp_ms: int | None


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Confirmed losses: objects, their bytes in the metadata, affected streams, and ranges.

    `refuted` objects turned out intact or no longer needed when they were looked up again. `first`
    has a few of the ranges.
    """

    objects: int
    size: int
    streams: int
    ranges: int
    refuted: int
    first: tuple[LostRange, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanResult:
    """Findings of a plan: the content of plan.json.

    Times are Unix milliseconds.

    - `place`: normalized endpoint and bucket of the store.
    - `map_end_offset`, `map_epoch`: state of the compared metadata. They, `next_object_id`,
      `next_stream_id` and `map_objects` are None without metadata. `next_stream_id` is also None in
      plans of earlier versions.
    - `young_from_ms`: start of the grace period. `unsafe_grace`: a short period was allowed.
    - `engine`: the engine that computed the verdicts.
    - `inventory`: address of the inventory, empty if the bucket was listed. `listing_started_ms` is
      then the start of the inventory.
    - `repeated_rows`: rows ignored because another row of the same key counts.
    - `unfinished_uploads`: their number, or None if they could not be listed.
    - `read`: number of read objects by finding, empty if none were to be read.
    - `losses`: None if they could not be confirmed.
    - `unknown`: sentences that name missing facts.
    """

    cluster_id: str
    cluster_uuid: str
    store: str
    place: str
    namespace: str
    connect: tuple[str, ...]
    created_at_ms: int
    listing_started_ms: int
    young_from_ms: int
    unsafe_grace: bool
    engine: str = "spark"
    inventory: str = ""
    repeated_rows: int = 0
    map_end_offset: int | None = None
    map_epoch: int | None = None
    next_object_id: int | None = None
    next_stream_id: int | None = None
    map_objects: int | None = None
    classes: Mapping[Verdict, Tally] = field(default_factory=dict)
    unfinished_uploads: int | None = None
    read: Mapping[str, int] = field(default_factory=dict)
    losses: LossCounts | None = None
    unknown: tuple[str, ...] = ()
    guards: tuple[GuardResult, ...] = ()

    @property
    def identity(self) -> ClusterIdentity:
        """The compared cluster."""
        return ClusterIdentity(self.cluster_id, self.cluster_uuid, self.namespace)

    @property
    def candidates(self) -> Tally:
        """Keys that apply may delete."""
        return self.classes.get(Verdict.ORPHAN, Tally())

    @property
    def lost(self) -> int:
        """Number of confirmed missing or damaged objects."""
        return 0 if self.losses is None else self.losses.objects

    @property
    def is_compared(self) -> bool:
        """Whether orphans and losses are known: metadata was copied and losses were looked up."""
        return self.losses is not None

    @property
    def suspected(self) -> int:
        """Number of objects that seem missing or damaged after listing and reading."""
        return sum(self.classes[verdict].keys for verdict in LOST if verdict in self.classes)

    @property
    def failed_guards(self) -> tuple[GuardResult, ...]:
        """The failed guards, which forbid applying this plan."""
        return tuple(guard for guard in self.guards if not guard.passed)


@contextmanager
def new_plan_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder that becomes `folder` if the block succeeds, and is deleted otherwise.

    Raises:
        PlanError: `folder` exists already, or its parent is not writable.
    """
    refuse_existing(folder)
    # Next to the folder, because a rename works only within a file system.
    draft = folder.absolute().with_name(f".{folder.name}.draft-{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise PlanError(
            f"can't write a plan at {folder} ({error}). Choose a writable folder"
        ) from error
    try:
        yield draft
        refuse_existing(folder)
        # Checked again, because hours may have passed and a rename replaces an empty folder.
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def refuse_existing(folder: Path) -> None:
    """Raise `PlanError` if `folder` exists. A plan is never overwritten."""
    if folder.exists() or folder.is_symlink():
        raise PlanError(
            f"{folder} exists already and a plan is never overwritten. Name a new folder, or"
            " delete this one"
        )


def write_plan_file(folder: Path, plan: PlanResult) -> None:
    """Write plan.json durably, as the last file of a draft."""
    document = {"version": FORMAT_VERSION} | asdict(plan)
    text = json.dumps(document, indent=2) + "\n"
    durable_files.replace_file(durable_files.PosixFileSystem(), folder / PLAN_FILE, [text.encode()])


def read_plan_file(folder: Path) -> PlanResult:
    """Read the plan in `folder`. Raises `PlanError` unless this version can read it."""
    path = folder / PLAN_FILE
    try:
        document = parsing.parse_json(path.read_text())
    except OSError as error:
        raise PlanError(
            f"{path} can't be read ({error.strerror}). Name a folder of `streammeta reconcile plan`"
        ) from error
    except ValueError as error:
        raise PlanError(f"{path} is damaged ({error}). Make a new plan") from error

    version = document.get("version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise PlanError(
            f"{path} has version {version!r}, expected {FORMAT_VERSION}. Make a new plan with this"
            " version of streammeta"
        )

    try:
        return _plan_from(document)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path} is damaged (field {error}). Make a new plan") from error


def _plan_from(document: dict[str, Any]) -> PlanResult:
    fields = {name: value for name, value in document.items() if name != "version"}
    for name in _TIMES:
        # `bool` is a subclass of `int`, and these times decide what may be deleted.
        if type(fields[name]) is not int:
            raise TypeError(f"{name!r} is {fields[name]!r}, expected Unix milliseconds")
    fields["connect"] = tuple(fields["connect"])
    fields["unknown"] = tuple(fields["unknown"])
    fields["classes"] = {Verdict(name): Tally(**tally) for name, tally in fields["classes"].items()}
    fields["losses"] = _losses_from(fields.get("losses"))
    fields["guards"] = tuple(GuardResult(**guard) for guard in fields["guards"])
    return PlanResult(**fields)


def _losses_from(found: dict[str, Any] | None) -> LossCounts | None:
    if found is None:
        return None
    ranges = tuple(LostRange(**range_) for range_ in found["first"])
    return LossCounts(**found | {"first": ranges})


# Writers upload an object before they commit it, and an upload may be retried for minutes.
GRACE_FLOOR_MS = 15 * 60 * 1000
"""Shortest grace period without --unsafe-grace, in milliseconds."""

# Apply checks each key again, so age is not unsafe. But an old plan's counts and guards say little
# about the bucket of today.
PLAN_LIFE_MS = 24 * 3600 * 1000
"""Age of a plan's listing above which apply rejects the plan, in milliseconds."""

CLOCK_SKEW_MS = 10 * 60 * 1000
"""Largest tolerated difference between two machines' clocks, in milliseconds."""


def check_grace(grace_ms: int, *, is_unsafe: bool) -> None:
    """Raise `ConfigurationError` on a grace period that is negative, or short by accident."""
    if grace_ms < 0:
        raise ConfigurationError(f"grace period is {grace_ms} ms, expected 0 or more")
    if grace_ms < GRACE_FLOOR_MS and not is_unsafe:
        raise ConfigurationError(
            f"--grace is {grace_ms // 1000} s, expected at least {GRACE_FLOOR_MS // 60_000}m,"
            " because new objects of a broker may look like orphans. --unsafe-grace accepts"
            " less, for clusters without writers"
        )


def check_plan(folder: Path, plan: PlanResult, now_ms: int) -> None:
    """Reject a plan that is only a report, too old, dated in the future, or without a grace period.

    Raises:
        PlanError: the plan must not be applied. Names the reason.
    """
    if plan.failed_guards:
        reasons = "; ".join(f"{guard.name}: {guard.detail}" for guard in plan.failed_guards)
        raise PlanError(f"plan {folder} is only a report, its guards failed: {reasons}")

    if plan.next_object_id is None:
        raise PlanError(f"plan {folder} was made without the metadata. Make a new plan")

    # An inventory is old by nature. Such a plan's age is the age of its copy of the metadata.
    listed_ms = plan.created_at_ms if plan.inventory else plan.listing_started_ms
    # Both times come from this file. The stricter one counts.
    earliest = min(plan.created_at_ms, listed_ms)
    latest = max(plan.created_at_ms, plan.listing_started_ms)
    if now_ms - earliest > PLAN_LIFE_MS:
        raise PlanError(
            f"plan {folder} is {(now_ms - earliest) // 3_600_000} h old, expected at most"
            f" {PLAN_LIFE_MS // 3_600_000} h. Make a new plan"
        )
    # With a clock that is behind, the grace period would seem longer than it was.
    if latest - now_ms > CLOCK_SKEW_MS:
        raise PlanError(
            f"plan {folder} is dated {(latest - now_ms) // 1000} s in the future. Correct this"
            " machine's clock, or make a new plan"
        )

    try:
        check_grace(plan.listing_started_ms - plan.young_from_ms, is_unsafe=plan.unsafe_grace)
    except ConfigurationError as error:
        raise PlanError(f"plan {folder} can't be applied ({error}). Make a new plan") from error


def check_store(store: StoreAddress, plan: PlanResult) -> None:
    """Raise `PlanError` unless `store` is the plan's bucket at the plan's endpoint."""
    place = place_of(store)
    if place != plan.place:
        raise PlanError(
            f"plan is for the store {plan.place}, but {store} is {place}. Give"
            " --store with the same bucket and endpoint, or make a plan of this one"
        )


def check_identity(found: ClusterIdentity, plan: PlanResult, connect: tuple[str, ...]) -> None:
    """Raise `PlanError` unless the controllers belong to the plan's cluster."""
    if found != plan.identity:
        raise PlanError(
            f"plan is for {plan.identity.describe()}, but {', '.join(connect)} is"
            f" {found.describe()}. Apply it with --connect of its cluster"
        )


PLANS_SHOWN = 30
# A folder of `watch` may contain years of rounds.
_FOLDERS_READ = 300


def earlier_plans(folder: Path, plan: PlanResult) -> tuple[PlanResult, ...]:
    """Return the last plans before `plan`, oldest first. `folder` is the folder of `plan`.

    Of very many folders, only the most recently written plans are read.
    """
    files = [(_written_at(path), path) for path in folder.absolute().parent.glob(f"*/{PLAN_FILE}")]
    found: list[PlanResult] = []
    for _, path in sorted(files, reverse=True)[:_FOLDERS_READ]:
        # A draft, a damaged plan or one of another version only shortens the history.
        with suppress(PlanError):
            found.append(read_plan_file(path.parent))
    # A parent folder may contain plans of several clusters.
    same = [
        earlier
        for earlier in found
        if (earlier.identity, earlier.place) == (plan.identity, plan.place)
        and earlier.listing_started_ms < plan.listing_started_ms
        and earlier.next_object_id is not None
    ]
    return tuple(sorted(same, key=lambda earlier: earlier.listing_started_ms)[-PLANS_SHOWN:])


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # deleted meanwhile
        return 0.0
