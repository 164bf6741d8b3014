"""Mutants of backups: order of files, what is copied, gaps, and what is removed."""

from tests.mutants.mutant import Mutant, Tested

_UPLOAD = "tests/backup/test_backup_upload.py"
_CHAINS = "tests/backup/test_backup_chains.py"

BACKUPS = (
    Mutant(
        "manifest-before-segment",
        "The manifest of a backup's file is put first, so a crash leaves one without its file.",
        "the classic of two files without an order; Litestream and Redpanda both order theirs",
        """
        streammeta.controller.backup.archive:
        + self._store.put(self.folder.manifest_key(name), json_files.encode(manifest))
          self._store.put(self.folder.key(name), data, if_absent=True)
        """,
        Tested(f"{_UPLOAD}::test_a_segment_is_put_before_its_manifest_and_a_lone_one_is_no_harm"),
    ),
    Mutant(
        "backup-of-uncommitted-entries",
        "The leader copies all of its log, with entries that another leader may overwrite.",
        "a tail that is taken for the log; KAFKA-7415 is of this family",
        """
        streammeta.controller.backup.uploader:
        - fit = [one for one in read if one.end_offset <= end_offset]
        + fit = [*read]
        """,
        Tested(f"{_UPLOAD}::test_an_entry_that_is_not_committed_is_never_put"),
    ),
    Mutant(
        "gap-taken-for-a-chain",
        "A chain of segments goes on behind a missing one.",
        "Litestream issue 930: restores that hung or skipped where files were missing",
        """
        streammeta.controller.backup.chains:
        - if segment.start_offset > end:
        -     break
        """,
        Tested(f"{_CHAINS}::test_a_missing_segment_ends_the_chain_and_is_named"),
    ),
    Mutant(
        "retention-removes-the-base",
        "The checkpoint that the oldest kept chain begins with is removed with those before it.",
        "retention by age of each file alone, as bucket rules do it",
        """
        streammeta.controller.backup.chains:
        - *(one for one in inventory.checkpoints if one.end_offset < keep_from),
        + *(one for one in inventory.checkpoints if one.end_offset <= keep_from),
        """,
        Tested(
            f"{_CHAINS}::test_retention_keeps_every_point_from_its_time_on_and_the_newest_chain"
        ),
    ),
    Mutant(
        "overlap-not-compared",
        "A segment that continues another history than the files before it is replayed.",
        "two writers to one path made backups unrestorable: Litestream issue 224",
        """
        streammeta.controller.backup.replaying:
        - if is_next and manifest.log_hash_before != before.log_hash.hex():
        + if False:
        """,
        Tested(f"{_CHAINS}::test_leaders_that_disagree_are_found"),
    ),
)
