"""Mutants of reads that compare what they read with its checksum."""

from tests.mutants.mutant import Mutant, Tested

_READS = "tests/broker_client/test_damaged_objects.py::"
_COMPACTION = "tests/compaction/test_compaction_damage.py::"

DAMAGE = (
    Mutant(
        "block-not-compared",
        "A block is read again without a look at the checksum that was learned for it.",
        "measured: 43 % of random damages of an object stayed unseen by block reads",
        """
        streammeta.client.reading.object_source:
        - if block.crc32c == UNKNOWN_CRC:
        + if block.crc32c >= UNKNOWN_CRC:
        """,
        Tested(_READS + "test_damage_is_named_by_object_block_and_position"),
    ),
    Mutant(
        "checksums-learned-of-damage",
        "Checksums of blocks are learned from an object that is not as it was uploaded.",
        "as above",
        """
        streammeta.client.reading.verified_blocks:
        - whole.verify(crc32c, source=source)
        + whole.verify(whole.value, source=source)
        """,
        Tested(_READS + "test_no_damage_of_an_object_with_a_checksum_stays_unseen"),
    ),
    Mutant(
        "torn-transfer-counts-as-damage",
        "One bad transfer of a range is taken for damage of the object.",
        "a deep run reads twice for the same reason",
        """
        streammeta.client.reading.object_source:
              return read()
        - except CorruptObjectError as error:
        + except ZeroDivisionError as error:
        """,
        Tested(_READS + "test_a_torn_transfer_is_no_damage"),
    ),
    Mutant(
        "expired-blocks-not-compared",
        "A set object of which some blocks have expired is compacted without a comparison.",
        "the new object's checksum then vouches for the damage of the others",
        """
        streammeta.client.compaction.sso_run:
        - await read_gaps(self._checks, context.calls, context.key_of, source_ids, figures)
        + await read_gaps(self._checks, context.calls, context.key_of, (), figures)
        """,
        Tested(_COMPACTION + "test_no_random_damage_of_a_set_object_is_copied"),
    ),
    Mutant(
        "copied-blocks-not-compared",
        "Blocks that the store copies by itself are never compared with their checksum.",
        "damage entered new objects by server-side copies",
        """
        streammeta.client.compaction.stream_object_output:
        - await read_gaps(checks, calls, key_of, self._sources, self._moved)
        + await read_gaps(checks, calls, key_of, (), self._moved)
        """,
        Tested(_COMPACTION + "test_damage_is_not_copied_by_the_store_either"),
    ),
    Mutant(
        "front-of-gap-forgotten",
        "Only what is missing at the end of a source is read for its checksum.",
        "a variant of the blocks that are not compared",
        """
        streammeta.storage.compaction.verification:
        - if position > end:
        + if position > end > 0:
        """,
        Tested(_COMPACTION + "test_damage_is_found_where_the_front_of_a_source_was_trimmed"),
    ),
)
