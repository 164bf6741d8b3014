"""Mutants of feature levels: versions that take part in what they can't read."""

from tests.mutants.mutant import Mutant, Simulated, Tested

_UPDATES = "tests/runtime/test_feature_updates.py::"

LEVELS = (
    Mutant(
        "level-beyond-replayed",
        "A version replays a level that it lacks, and goes on without what the level adds.",
        "Kafka stops at a metadata.version beyond its range (KIP-778)",
        """
        streammeta.controller.metadata.registries.feature_level:
        - if not self._levels.include(record.level):
        + if False:
        """,
        Simulated("swarm", range(272, 300)),
    ),
    Mutant(
        "absent-voter-not-asked",
        "The level is raised while a voter is away, whose version nothing tells.",
        "Kafka refuses while a controller has not registered (FeatureControlManager)",
        """
        streammeta.controller.runtime.replication.peer_versions:
        - asked = {self._local, *self._connected, *voters}
        + asked = {self._local, *self._connected}
        """,
        Tested(_UPDATES + "test_a_voter_that_lacks_the_level_or_is_not_connected_blocks_it"),
    ),
    Mutant(
        "older-voter-counted",
        "A controller whose hello has no levels is taken for one that has them all.",
        "etcd takes the version of its lowest member for the cluster's",
        """
        streammeta.controller.features:
        - UNTOLD = Software("", Levels(BASE_LEVEL, BASE_LEVEL))
        + UNTOLD = Software("", SUPPORTED)
        """,
        Tested(_UPDATES + "test_a_voter_that_lacks_the_level_or_is_not_connected_blocks_it"),
    ),
    Mutant(
        "level-raised-without-all",
        "The leader raises the level as soon as it has it itself.",
        "Kafka asks every controller for its range first (FeatureControlManager)",
        """
        streammeta.controller.runtime.writer.feature_updates:
        - self._check_versions(level)
        """,
        Tested(_UPDATES + "test_a_connected_observer_blocks_and_so_does_the_leader_itself"),
    ),
    Mutant(
        "departed-version-remembered",
        "The software of a controller that has disconnected is still counted.",
        "facts that outlive the process which told them",
        """
        streammeta.controller.peers.server:
        - self._server.versions.disconnected(self._sender, self._software)
        + pass
        """,
        Tested(
            "tests/quorum/test_peer_server.py"
            "::test_the_software_of_a_peer_is_known_while_it_is_connected"
        ),
    ),
    Mutant(
        "unknown-field-dropped",
        "A field of a record that this version does not know is dropped, and the map forks.",
        "the codec here, before records had levels: protobuf drops them without a word",
        """
        streammeta.controller.records.codec:
        - _reject_unknown_fields(record_set, payload)
        """,
        Tested(
            "tests/metadata/test_metadata_codec.py"
            "::test_a_field_that_a_newer_version_added_is_refused_wherever_it_is"
        ),
    ),
    Mutant(
        "level-between-two-reads-missed",
        "A start does not find a level's record that lies across two reads of the log.",
        "the seam of every search in pieces",
        """
        streammeta.controller.runtime.replication.feature_check:
        - if _MARK in file.read(position, _PIECE_BYTES + len(_MARK)):
        + if _MARK in file.read(position, _PIECE_BYTES):
        """,
        Tested(
            "tests/runtime/test_level_check.py"
            "::test_a_level_beyond_this_version_is_found_wherever_it_is"
        ),
    ),
    Mutant(
        "data-left-behind-by-a-downgrade",
        "The level is lowered although what lies between has changed the log.",
        "unsafe downgrades lose metadata (KIP-584)",
        """
        streammeta.controller.metadata.registries.feature_level:
        - if record.level == self._current or data_changes(record.level, self._current):
        + if record.level == self._current:
        """,
        Tested(
            "tests/metadata/test_feature_level.py"
            "::test_a_level_is_lowered_where_none_between_has_changed_data"
        ),
    ),
)
