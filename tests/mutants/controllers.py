"""Mutants of the active controller and of what it needs of the driver: answers, undo, watches."""

from tests.mutants.mutant import Mutant, Simulated, Tested

CONTROLLERS = (
    Mutant(
        "answer-before-high-watermark",
        "A write is answered when it is appended, before a majority has it.",
        "acknowledged writes lost by a crash of the leader, as with acks=1 in Kafka",
        """
        streammeta.controller.runtime.writer.controller:
        - waiting = self._answers.until(end_offset) if end_offset > self._committed_end else None
        + waiting = None
        """,
        Simulated("calm"),
    ),
    Mutant(
        "undo-forgets-the-log-hash",
        "Losing leadership undoes the map, and not the rolling hash of the log.",
        "KAFKA-13100 and KAFKA-13114 are of this family",
        """
        streammeta.controller.runtime.writer.controller:
        - self._log_hash.undo_to(self._committed_end)
        """,
        Simulated("restless"),
    ),
    Mutant(
        "session-read-of-uncommitted",
        "A session's read at the leader shows what may yet be undone.",
        "the family of dirty reads",
        """
        streammeta.controller.runtime.writer.controller:
          while True:
              answered = self._query_shown(request)
        -     if await self._is_committed(answered.offset):
        -         return answered
        +     return answered
        """,
        Simulated("mixed"),
    ),
    Mutant(
        "refusal-without-proof",
        "An answer that changes nothing is given without a proof that this node still leads.",
        "found here by the simulator",
        """
        streammeta.controller.runtime.writer.submission:
        - if not self._is_proven:
        + if False:
        """,
        Simulated("split", range(1000), is_rare=True),
    ),
    Mutant(
        "read-barrier-left-out",
        "The controller answers linearizable reads without a round of acknowledgements.",
        "stale reads of etcd and Consul before 2015 (Jepsen)",
        """
        streammeta.controller.runtime.writer.controller:
        - await log.read_barrier()
          while True:
        """,
        Tested(
            "tests/runtime/test_runtime_controller.py::test_a_read_is_answered_by_the_leader_alone"
        ),
    ),
    Mutant(
        "view-of-uncommitted",
        "A frozen view is handed out before everything in it is committed.",
        "exports and snapshots of state that is undone later",
        """
        streammeta.controller.runtime.writer.controller:
        - await self._shown(log, frozen.id.end_offset)
        """,
        Simulated("mixed", seeds=range(19, 219)),
    ),
    Mutant(
        "hash-of-uncommitted",
        "The hash of the map at an offset is given before that offset is committed.",
        "replicas that look different and are not",
        """
        streammeta.controller.runtime.writer.controller:
        - waiting = self._answers.until(offset) if offset > self._committed_end else None
        + waiting = None
        """,
        Simulated("mixed"),
    ),
    Mutant(
        "changes-before-commit",
        "Watchers of a leader see entries when they are appended.",
        "etcd's watches showed what a deposed leader had not committed in early versions",
        """
        streammeta.controller.runtime.writer.controller:
          self._uncommitted.append((offset, records))
        + batch = Batch(offset, 0, BatchKind.DATA, (payload,))
        + self._changes.extend((batch,), end_offset)
        """,
        Simulated("calm"),
    ),
    Mutant(
        "changes-skipped-by-a-snapshot",
        "A watcher whose node loads a snapshot goes on behind it as if nothing had been skipped.",
        "missed events after a reset connection, the classic of Kubernetes watches",
        """
        streammeta.controller.runtime.writer.change_feed:
        - self.start_offset = self.end_offset = end_offset
        + self.end_offset = end_offset
        """,
        Simulated("snapshots"),
    ),
    Mutant(
        "changes-dropped-in-silence",
        "A watcher that is too slow for the ring goes on behind what it has missed.",
        "lost events of slow consumers",
        """
        streammeta.controller.runtime.writer.change_feed:
        - self.start_offset = self._offsets[self._first] + 1
        """,
        Simulated("mixed"),
    ),
    Mutant(
        "claimed-before-catching-up",
        "A new leader serves before it has replayed everything committed.",
        "KAFKA-15345",
        """
        streammeta.controller.runtime.replication.quorum_driver:
        - if self._core.is_established and self._deliverer.is_caught_up():
        + if self._core.is_established:
        """,
        Simulated("snapshots", range(1000), is_rare=True),
    ),
)
