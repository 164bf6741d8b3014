"""Folder of a plan: its layout, atomic creation, reading, and admission to apply.

    plan.json      what was compared, the counts, the findings of the guards
    candidates/    Parquet: the keys that apply may delete
    verdicts/      Parquet: every key of the bucket and every missing object, with its verdict
    report.html    the findings for a browser; nothing reads it
    losses/        Parquet: the ranges of streams in what is missing or damaged, confirmed; missing
                   if it could not be confirmed
    uploads/       Parquet: unfinished multipart uploads; missing if they could not be listed
    map/           Parquet: the objects of the map that the listing was compared with
    listing/       Parquet: every key of the bucket; instead of candidates, verdicts and map, if
                   the map could not be copied
    runs/          one folder for each time the plan was applied; see `deletion`

A plan is built in a folder beside it and renamed, so a folder with a plan.json is complete. It
holds no secret: store URIs are written without credentials. Admission compares what a plan says of
itself with the clock and with the arguments of apply; controllers and bucket are checked in
`identity`.
"""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from streammeta.reconcile.cluster.identity import ClusterIdentity, place_of
from streammeta.reconcile.vocabulary.errors import ConfigurationError, PlanError
from streammeta.reconcile.vocabulary.tables import Tally
from streammeta.reconcile.vocabulary.verdicts import LOST, GuardResult, Verdict
from streammeta.storage.durable_files import PosixFileSystem, replace_file
from streammeta.storage.object_store.protocol.address import without_secrets
from streammeta.storage.parsing import parse_json

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
"""In the folder of a run: what is known of each object that it was to change; else missing."""

_TIMES = ("created_at_ms", "listing_started_ms", "young_from_ms")


@dataclass(frozen=True, slots=True)
class LostRange:
    """Offsets of a stream in an object that is missing or damaged; None: it holds no range.

    `min_timestamp_ms` and `max_timestamp_ms` bound the times of its records, if they are known.
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
    """Confirmed losses: objects, their bytes by the map, streams concerned, and ranges.

    `refuted` were looked up again and found as they should be, or not wanted any more. `first` are
    a few of the ranges.
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

    Times are Unix milliseconds. `place` is the one spelling of the store's endpoint and bucket.
    `map_end_offset` and `map_epoch` name the state of the map that was compared; they,
    `next_object_id`, `next_stream_id` and `map_objects` are None if there was none, and
    `next_stream_id` in plans of earlier versions. `young_from_ms` is when the grace
    period began; `unsafe_grace` that a short one was asked for. `engine` is that which judged the
    keys. `inventory` is the address of the inventory that was read, empty if the bucket was listed;
    `listing_started_ms` is then when that was begun. `repeated_rows` is the number of its rows that
    were passed over, as another of the same key counts. `unfinished_uploads` is None if they could
    not be listed. `read` are numbers of objects by what reading them has found, empty if none were
    to be read. `losses` is None if they could not be confirmed. `unknown` says in sentences what
    could not be found out.
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
        """The cluster that was compared."""
        return ClusterIdentity(self.cluster_id, self.cluster_uuid, self.namespace)

    @property
    def candidates(self) -> Tally:
        """Keys that apply may delete."""
        return self.classes.get(Verdict.ORPHAN, Tally(0, 0))

    @property
    def lost(self) -> int:
        """Number of objects that are missing or damaged, confirmed."""
        return 0 if self.losses is None else self.losses.objects

    @property
    def is_compared(self) -> bool:
        """Whether orphans and losses are known: there was a map, and losses were looked up."""
        return self.losses is not None

    @property
    def suspected(self) -> int:
        """Number of objects that listing and reading have found missing or damaged."""
        return sum(self.classes[verdict].keys for verdict in LOST if verdict in self.classes)

    @property
    def failed_guards(self) -> tuple[GuardResult, ...]:
        """The guards that forbid to apply this plan."""
        return tuple(guard for guard in self.guards if not guard.passed)


@contextmanager
def new_plan_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft folder that becomes `folder` when the block succeeds, else is deleted.

    Raises:
        PlanError: `folder` exists already, or nothing can be written beside it.
    """
    refuse_existing(folder)
    draft = folder.absolute().with_name(f".{folder.name}.draft-{secrets.token_hex(4)}")
    try:
        draft.mkdir(parents=True)
    except OSError as error:
        raise PlanError(
            f"can't write a plan at {folder} ({error}); choose a folder that can be written to"
        ) from error
    try:
        yield draft
        refuse_existing(folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def refuse_existing(folder: Path) -> None:
    """Raise `PlanError` if there is anything at `folder`; a plan is never overwritten."""
    if folder.exists() or folder.is_symlink():
        raise PlanError(
            f"{folder} exists already and a plan is never overwritten; name a new folder, or"
            " delete this one"
        )


def write_plan_file(folder: Path, plan: PlanResult) -> None:
    """Write plan.json durably; the last file of a draft to be written."""
    document = {"version": FORMAT_VERSION} | asdict(plan)
    text = json.dumps(document, indent=2) + "\n"
    replace_file(PosixFileSystem(), folder / PLAN_FILE, [text.encode()])


def read_plan_file(folder: Path) -> PlanResult:
    """Read the plan in `folder`. Raises `PlanError` if there is none that this version can read."""
    path = folder / PLAN_FILE
    try:
        document = parse_json(path.read_text())
    except OSError as error:
        raise PlanError(
            f"{path} can't be read ({error.strerror}); name a folder that"
            " `streammeta reconcile plan` made"
        ) from error
    except ValueError as error:
        raise PlanError(f"{path} is damaged ({error}); make a new plan") from error

    version = document.get("version") if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise PlanError(
            f"{path} has version {version!r}, wanted {FORMAT_VERSION}; make a new plan with this"
            " version of streammeta"
        )

    try:
        return _plan_from(document)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path} is damaged (field {error}); make a new plan") from error


def _plan_from(document: dict[str, Any]) -> PlanResult:
    fields = {name: value for name, value in document.items() if name != "version"}
    for name in _TIMES:
        if type(fields[name]) is not int:
            raise TypeError(f"{name!r} is {fields[name]!r}, wanted Unix milliseconds")
    fields["connect"] = tuple(fields["connect"])
    fields["unknown"] = tuple(fields["unknown"])
    fields["classes"] = {Verdict(name): Tally(**tally) for name, tally in fields["classes"].items()}
    fields["losses"] = _losses_from(fields.get("losses"))
    fields["guards"] = tuple(GuardResult(**guard) for guard in fields["guards"])
    return PlanResult(**fields)


def _losses_from(found: dict[str, Any] | None) -> LossCounts | None:
    if found is None:
        return None
    return LossCounts(**found | {"first": tuple(LostRange(**one) for one in found["first"])})


GRACE_FLOOR_MS = 15 * 60 * 1000
"""Shortest grace period without --unsafe-grace, in milliseconds."""

PLAN_LIFE_MS = 24 * 3600 * 1000
"""Time since the listing began after which a plan is refused, in milliseconds."""

CLOCK_SKEW_MS = 10 * 60 * 1000
"""Largest tolerated difference between two machines' clocks, in milliseconds."""


def check_grace(grace_ms: int, *, is_unsafe: bool) -> None:
    """Raise `ConfigurationError` on a grace period that is negative, or short by accident."""
    if grace_ms < 0:
        raise ConfigurationError(f"the grace period is {grace_ms} ms, wanted 0 or more")
    if grace_ms < GRACE_FLOOR_MS and not is_unsafe:
        raise ConfigurationError(
            f"--grace is {grace_ms // 1000} s, wanted at least {GRACE_FLOOR_MS // 60_000}m: what a"
            " broker has just written may look like an orphan; --unsafe-grace takes less, for"
            " clusters without writers"
        )


def check_plan(folder: Path, plan: PlanResult, now_ms: int) -> None:
    """Refuse a plan that is a report only, too old, of the future, or without a grace period.

    Raises:
        PlanError: the plan must not be applied, with the reason.
    """
    if plan.failed_guards:
        reasons = "; ".join(f"{guard.name}: {guard.detail}" for guard in plan.failed_guards)
        raise PlanError(f"the plan {folder} is a report only, its guards failed: {reasons}")

    if plan.next_object_id is None:
        raise PlanError(f"the plan {folder} was made without a copy of the map; make a new plan")

    # An inventory is old by nature; what makes a plan old is the copy of the map.
    listed_ms = plan.created_at_ms if plan.inventory else plan.listing_started_ms
    earliest = min(plan.created_at_ms, listed_ms)
    latest = max(plan.created_at_ms, plan.listing_started_ms)
    if now_ms - earliest > PLAN_LIFE_MS:
        raise PlanError(
            f"the plan {folder} is {(now_ms - earliest) // 3_600_000} h old, wanted at most"
            f" {PLAN_LIFE_MS // 3_600_000} h; make a new plan"
        )
    if latest - now_ms > CLOCK_SKEW_MS:
        raise PlanError(
            f"the plan {folder} is dated {(latest - now_ms) // 1000} s in the future; set this"
            " machine's clock right, or make a new plan"
        )

    try:
        check_grace(plan.listing_started_ms - plan.young_from_ms, is_unsafe=plan.unsafe_grace)
    except ConfigurationError as error:
        raise PlanError(f"the plan {folder} can't be applied ({error}); make a new plan") from error


def check_store(store: str, plan: PlanResult) -> None:
    """Raise `PlanError` unless `store` is the plan's bucket at the plan's endpoint."""
    place = place_of(store)
    if place != plan.place:
        raise PlanError(
            f"the plan is of the store {plan.place}, but {without_secrets(store)} is {place};"
            " give --store of the same bucket and endpoint, or make a plan of this one"
        )


def check_identity(found: ClusterIdentity, plan: PlanResult, connect: tuple[str, ...]) -> None:
    """Raise `PlanError` unless the controllers are of the plan's cluster."""
    if found != plan.identity:
        raise PlanError(
            f"the plan is of {plan.identity.described()}, but {', '.join(connect)} is"
            f" {found.described()}; apply it with --connect of its own cluster"
        )
