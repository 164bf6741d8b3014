"""Mutants of the state that replicas are compared by: digests, checkpoint files, undo."""

from tests.mutants.mutant import Mutant, Tested

_TESTS = "tests/metadata/test_state_digest.py"

STATE = (
    Mutant(
        "digest-skips-a-column",
        "The digest of the map leaves out one column, so replicas that differ in it look equal.",
        "found by mutants from outside; nothing changed one column at a time",
        """
        streammeta.controller.metadata.sections.frozen:
        - _hash_column(state.update, values)
        + if column_name != "data_time_ms":
        +     _hash_column(state.update, values)
        """,
        Tested(f"{_TESTS}::test_the_digest_tells_apart_sections_that_differ_in_anything"),
    ),
    Mutant(
        "digest-without-lengths",
        "Texts are hashed one after the other, so one that moves to its neighbour goes unnoticed.",
        "the classic of hashing without lengths or separators",
        """
        streammeta.controller.metadata.sections.frozen:
        - update(len(encoded).to_bytes(8, "little"))
        """,
        Tested(f"{_TESTS}::test_the_digest_tells_apart_sections_that_differ_in_anything"),
    ),
    Mutant(
        "section-leaves-out-a-field",
        "A field of a node is in no column with its own value, so no checkpoint keeps it.",
        "a field added to the state and forgotten in the snapshot; KAFKA-14894 is of this family",
        """
        streammeta.controller.metadata.sections.frozen:
        - values = [getattr(node, name) for node in nodes]
        + values = [getattr(node, name) if name != "recovered_by" else -1 for node in nodes]
        """,
        Tested(f"{_TESTS}::test_whatever_the_map_hands_over_is_in_the_digest"),
    ),
    Mutant(
        "restore-drops-a-column",
        "A column of a checkpoint file is read and thrown away.",
        "a field that is back at its default after a restart",
        """
        streammeta.controller.metadata.sections.restore:
        - return bool(cell) if name in FLAGS else int(cell)
        + return bool(cell) and name != "supervised" if name in FLAGS else int(cell)
        """,
        Tested(f"{_TESTS}::test_a_map_from_a_checkpoint_file_has_every_section_as_it_was"),
    ),
    Mutant(
        "checkpoint-writes-bits-backwards",
        "Columns of yes and no are packed in the order that the reader does not expect.",
        "bit order is what writers of Arrow buffers get wrong",
        """
        streammeta.controller.snapshot.checkpoint_file:
        - data = np.packbits(values, bitorder="little") if is_boolean else np.ascontiguousarray(values)
        + data = np.packbits(values) if is_boolean else np.ascontiguousarray(values)
        """,  # noqa: E501 - a line of the product
        Tested(f"{_TESTS}::test_a_checkpoint_file_holds_every_cell"),
    ),
    Mutant(
        "undo-forgets-a-column",
        "Undoing an entry leaves one column of a stream as the entry had made it.",
        "an undo written by hand, column by column",
        """
        streammeta.controller.metadata.tables.tables:
        - undo.append(lambda: self.write(name, rows, old))
        + if name != "range_start":
        +     undo.append(lambda: self.write(name, rows, old))
        """,
        Tested(f"{_TESTS}::test_undo_brings_every_section_back"),
    ),
    Mutant(
        "log-hash-without-offsets",
        "The rolling hash of the log does not say at which offsets the entries were.",
        "replicas that differ by one offset; found here by chaos as another defect's effect",
        """
        streammeta.controller.runtime.persistence.state_hashes:
        - entry = _ENTRY.pack(offset, len(payload), google_crc32c.value(payload))
        + entry = _ENTRY.pack(0, len(payload), google_crc32c.value(payload))
        """,
        Tested(
            "tests/runtime/test_state_hashes.py"
            "::test_the_rolling_hash_tells_order_offsets_and_payloads_apart"
        ),
    ),
)
