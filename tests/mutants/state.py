"""Mutants of the state that replicas are compared by: digests, checkpoint files, undo."""

from __future__ import annotations

from tests.mutants.mutant import Edit, Mutant, Tested

_COLUMNS = "streammeta.controller.metadata.tables"
_FROZEN = "streammeta.controller.metadata.frozen"
_HASHES = "streammeta.controller.runtime.state_hashes"
_RESTORE = "streammeta.controller.metadata.restore"
_TESTS = "tests/metadata/test_state_digest.py"
_WRITER = "streammeta.controller.snapshot.checkpoint_file"

STATE = (
    Mutant(
        "digest-skips-a-column",
        "The digest of the map leaves out one column, so replicas that differ in it look equal.",
        "found by mutants from outside; nothing changed one column at a time",
        (
            Edit(
                _FROZEN,
                """
                _hash_column(state.update, values)
                """,
                """
                if column_name != "data_time_ms":
                    _hash_column(state.update, values)
                """,
            ),
        ),
        Tested(f"{_TESTS}::test_the_digest_tells_apart_sections_that_differ_in_anything"),
    ),
    Mutant(
        "digest-without-lengths",
        "Texts are hashed one after the other, so one that moves to its neighbour goes unnoticed.",
        "the classic of hashing without lengths or separators",
        (
            Edit(
                _FROZEN,
                """
                update(len(encoded).to_bytes(8, "little"))
                update(encoded)
                """,
                """
                update(encoded)
                """,
            ),
        ),
        Tested(f"{_TESTS}::test_the_digest_tells_apart_sections_that_differ_in_anything"),
    ),
    Mutant(
        "section-leaves-out-a-field",
        "A field of a node is in no column with its own value, so no checkpoint keeps it.",
        "a field added to the state and forgotten in the snapshot; KAFKA-14894 is of this family",
        (
            Edit(
                _FROZEN,
                "column([node.recovered_by for node in parts.nodes.in_order])",
                "column([-1 for node in parts.nodes.in_order])",
            ),
        ),
        Tested(f"{_TESTS}::test_whatever_the_map_hands_over_is_in_the_digest"),
    ),
    Mutant(
        "restore-drops-a-column",
        "A column of a checkpoint file is read and thrown away.",
        "a field that is back at its default after a restart",
        (Edit(_RESTORE, "supervised=bool(supervised),", "supervised=False,"),),
        Tested(f"{_TESTS}::test_a_map_from_a_checkpoint_file_has_every_section_as_it_was"),
    ),
    Mutant(
        "checkpoint-writes-bits-backwards",
        "Columns of yes and no are packed in the order that the reader does not expect.",
        "bit order is what writers of Arrow buffers get wrong",
        (Edit(_WRITER, 'np.packbits(values, bitorder="little")', "np.packbits(values)"),),
        Tested(f"{_TESTS}::test_a_checkpoint_file_holds_every_cell"),
    ),
    Mutant(
        "undo-forgets-a-column",
        "Undoing an entry leaves one column of a stream as the entry had made it.",
        "an undo written by hand, column by column",
        (
            Edit(
                _COLUMNS,
                """
                undo.append(lambda: self.write(name, rows, old))
                """,
                """
                if name != "range_start":
                    undo.append(lambda: self.write(name, rows, old))
                """,
            ),
        ),
        Tested(f"{_TESTS}::test_undo_brings_every_section_back"),
    ),
    Mutant(
        "log-hash-without-offsets",
        "The rolling hash of the log does not say at which offsets the entries were.",
        "replicas that differ by one offset; found here by chaos as another defect's effect",
        (
            Edit(
                _HASHES,
                "for number in (offset, len(payload), google_crc32c.value(payload)):",
                "for number in (len(payload), google_crc32c.value(payload)):",
            ),
        ),
        Tested(
            "tests/runtime/test_state_hashes.py"
            "::test_the_rolling_hash_tells_order_offsets_and_payloads_apart"
        ),
    ),
)
