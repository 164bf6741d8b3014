"""Conversion of a survivor's directory for the recovered cluster's only voter.

The new contents are written to `recovery-N/after` and replace the old ones file by file. The old
contents end up in `recovery-N/before` as a complete directory. `meta.json` leaves first and returns
last, so no controller can start in between. Each step may be interrupted, and the same plan
continues from there. `recovery-N.json` is the evidence of the recovery. N is the generation.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from streammeta.controller.backup.restoring import write_checkpoint
from streammeta.controller.ids import ClusterId, DirectoryId, NodeId
from streammeta.controller.journal import state_files
from streammeta.controller.journal.directory import (
    LOCK_NAME,
    META_NAME,
    FirstCheckpoint,
    evidence_name,
    format_directory,
    is_evidence,
    read_identity,
)
from streammeta.controller.journal.snapshots import parse_snapshot_name
from streammeta.controller.recover.planning import RecoveryError, RecoveryPlan
from streammeta.controller.recover.survivor import Survivor, read_survivor
from streammeta.storage.durable_files import FileSystem
from streammeta.storage.segmented_log import segment_base

_EVIDENCE_VERSION = 1
_OTHERS = {state_files.STATE_NAME, state_files.MARK_NAME, state_files.DAMAGE_NAME}
_ASIDE = ".damaged"


@dataclass(frozen=True, slots=True)
class Application:
    """One plan and one directory, which no other process may use meanwhile."""

    directory: Path
    plan: RecoveryPlan
    files: FileSystem

    @property
    def staging(self) -> Path:
        """Directory in which the new contents are written."""
        return self.directory / f"recovery-{self.plan.generation}" / "after"

    @property
    def before(self) -> Path:
        """Directory in which the old contents stay."""
        return self.staging.with_name("before")

    def is_done(self) -> bool:
        """Whether the directory already belongs to the recovered cluster."""
        # Its absence means that an exchange is in progress.
        if META_NAME not in self.files.names(self.directory):
            return False
        return read_identity(self.directory, self.files).directory_id == self.plan.directory_id

    def is_begun(self) -> bool:
        """Whether the exchange has started and is not finished.

        Raises:
            RecoveryError: another plan started it.
        """
        names = self.files.names(self.directory)
        if META_NAME in names:
            return False
        # A different plan would complete the exchange with other contents.
        if evidence_name(self.plan.generation) not in names or self._evidence() != self.plan_fields:
            others = [name for name in names if is_evidence(name)]
            raise RecoveryError(
                "ANOTHER_PLAN",
                f"{self.directory} has no {META_NAME}"
                + (f", and {', '.join(others)} of another plan" if others else ""),
                "use the directory that the plan was made for, or finish the plan that was begun",
            )
        return True

    def survivor(self) -> Survivor:
        """Read the directory before anything is changed.

        Raises:
            RecoveryError: it differs from the one that the plan was made for.
        """
        identity = read_identity(self.directory, self.files)
        survivor = read_survivor(self.directory, self.files, identity)
        if not self.plan.sees(survivor.report):
            found = survivor.report
            raise RecoveryError(
                "ANOTHER_DIRECTORY",
                f"{self.directory} is of node {found.node_id}, disk {found.directory_id}, epoch "
                f"{found.epoch}, and ends at {found.end_offset} of epoch {found.last_epoch}, but "
                f"the plan is for node {self.plan.node_id}, disk {self.plan.from_directory_id}, "
                f"epoch {self.plan.from_epoch}, ending at {self.plan.from_end_offset} of epoch "
                f"{self.plan.from_last_epoch}",
                "use the directory that the plan chose, or inspect all again and make a new plan",
            )
        return survivor

    def carry_out(self, fence: Callable[[], None]) -> None:
        """Do the remaining steps. `fence` puts the marker into the bucket, or finds it there.

        Raises:
            RecoveryError: the directory differs from the plan's. Nothing was changed.
            DiskFullError: there is no room. The call may be repeated.
        """
        if self.is_done():
            self._tidy()
            return
        if not self.is_begun():
            survivor = self.survivor()
            # Before anything moves, so that an interrupted run finds its plan again.
            self._put_evidence()
            self._stage(survivor)
            # Before the exchange: from here on no earlier controller may acknowledge changes.
            fence()
            self.files.make_directory(self.before)
            self._move(META_NAME, self.directory, self.before)
        self._exchange()
        self._tidy()

    @property
    def plan_fields(self) -> state_files.Fields:
        """The plan as stored in the evidence."""
        return {"version": _EVIDENCE_VERSION, "plan": asdict(self.plan)}

    def _evidence(self) -> state_files.Fields:
        path = self.directory / evidence_name(self.plan.generation)
        return state_files.read_sealed_json(self.files, path, _EVIDENCE_VERSION)

    def _put_evidence(self) -> None:
        path = self.directory / evidence_name(self.plan.generation)
        state_files.replace_sealed_json(self.files, path, self.plan_fields)

    def _stage(self, survivor: Survivor) -> None:
        """Write the new contents, from the beginning after an interruption."""
        # Files of an interrupted run may be incomplete.
        for name in self.files.names(self.staging):
            self.files.remove(self.staging / name)
        checkpoint = io.BytesIO()
        plan = self.plan
        write_checkpoint(checkpoint, survivor.replayed, plan.restore, plan.voters)
        # Without first voters: a vote for the former disk must not count for the new one.
        format_directory(
            self.staging,
            cluster_id=ClusterId(plan.cluster_id),
            node_id=NodeId(plan.node_id),
            directory_id=DirectoryId(plan.directory_id),
            first_checkpoint=FirstCheckpoint(plan.restore.snapshot_id, checkpoint.getvalue()),
            files=self.files,
        )

    def _exchange(self) -> None:
        """Move the old contents out and the new ones in. `meta.json` completes the exchange."""
        moved = set(self.files.names(self.before))
        new_checkpoint = self.plan.restore.snapshot_id.file_name
        for name in self.files.names(self.directory):
            # A name that was already moved out and is here again belongs to the new contents.
            if _is_content(name) and name not in moved and name != new_checkpoint:
                self._move(name, self.directory, self.before)
        # The lock belongs to the directory itself, which has its own.
        new = set(self.files.names(self.staging)) - {LOCK_NAME}
        for name in sorted(new, key=lambda name: name == META_NAME):
            self._move(name, self.staging, self.directory)

    def _move(self, name: str, source: Path, target: Path) -> None:
        self.files.rename(source / name, target / name)
        # The target first: after a crash the file may be in both directories, but never in neither.
        self.files.sync_directory(target)
        self.files.sync_directory(source)

    def _tidy(self) -> None:
        if self.staging.name in self.files.names(self.staging.parent):
            # Formatting has locked the staging directory, which is removed now.
            if LOCK_NAME in self.files.names(self.staging):
                self.files.remove(self.staging / LOCK_NAME)
            self.files.remove_directory(self.staging)


def _is_content(name: str) -> bool:
    """Whether a file belongs to the log and its state, unlike the reserve and the lock."""
    # Files set aside as damaged belong to the old contents too.
    whole = name.removesuffix(_ASIDE)
    is_log = segment_base(whole, ".log") is not None or parse_snapshot_name(whole) is not None
    return is_log or name in _OTHERS
