"""Mutants of reads and of what clients get to see."""

from tests.mutants.mutant import Mutant, Simulated, Tested

READS = (
    Mutant(
        "read-without-proof",
        "A leader answers reads without asking whether it still leads.",
        "stale reads of etcd and Consul before 2015 (Jepsen)",
        """
        streammeta.controller.quorum.leading:
        - confirmed = reached_by_majority(rounds)
        + confirmed = max(rounds)
        """,
        Simulated("takeover"),
    ),
    Mutant(
        "read-joins-round-under-way",
        "A read takes the proof of a round that had begun before the read arrived.",
        "why a read index needs a round of its own (Raft thesis, section 6.4)",
        """
        streammeta.controller.runtime.replication.waiters:
          read: asyncio.Future[EndOffset] = asyncio.get_running_loop().create_future()
        - self._forming.append(read)
        + (self._under_way or self._forming).append(read)
        """,
        Tested("tests/runtime/test_waiters.py::test_a_read_never_joins_the_round_under_way"),
    ),
    Mutant(
        "fetch-proves-leadership",
        "Any Fetch of the epoch proves leadership, even one sent before the read was asked for.",
        "why a read index needs a round of its own (Raft thesis, section 6.4)",
        """
        streammeta.controller.quorum.leading:
        - role.read_round += 1
        """,
        Tested(
            "tests/quorum/test_quorum_replication.py"
            "::test_a_read_waits_for_a_round_that_began_after_it"
        ),
    ),
    Mutant(
        "young-leader-trusted",
        "A leader that was elected a moment ago reads without asking whether it still leads.",
        "why a read index needs a round of its own (Raft thesis, section 6.4)",
        """
        streammeta.controller.quorum.roles:
          epoch_start: EndOffset
          progress: dict[ReplicaKey, ReplicaProgress]
        + started_at: int
        streammeta.controller.quorum.replica:
        - self._change_role(roles.Leader(start, progress))
        + self._change_role(roles.Leader(start, progress, self.now))
        streammeta.controller.quorum.leading:
        + if replica.now - role.started_at < replica.config.timings.election_timeout_ms:
        +     replica.emit(events.ReadIndexReady(read_id, replica.high_watermark))
        +     return
          role.read_round += 1
        """,
        Simulated("takeover"),
    ),
    Mutant(
        "first-read-at-once",
        "The first read of a leadership takes the commit of the leader's first batch for a proof.",
        "why a read index needs a round of its own (Raft thesis, section 6.4)",
        """
        streammeta.controller.quorum.leading:
        + first_end = replica.log.end_of_epoch(replica.epoch).end_offset
        + if role.read_round == 0 and replica.high_watermark == first_end:
        +     replica.emit(events.ReadIndexReady(read_id, replica.high_watermark))
        +     return
          role.read_round += 1
        """,
        Tested(
            "tests/quorum/test_quorum_replication.py"
            "::test_a_young_leader_proves_its_leadership_like_any_other"
        ),
    ),
    Mutant(
        "round-echoed-before-flush",
        "A Fetch that carries a new read round leaves before the flush it depends on.",
        "etcd's read contexts ride on heartbeats, which acknowledge nothing; a Fetch does both",
        """
        streammeta.controller.quorum.replica:
        - return events.Send(to, message, self._last_write)
        + is_old = getattr(self, "_echoed", 0) >= message.read_round
        + self._echoed = message.read_round
        + return events.Send(to, message, self._last_write if is_old else self._state_token)
        """,
        Tested(
            "tests/quorum/test_quorum_replication.py"
            "::test_a_fetch_that_carries_a_new_round_waits_for_the_flush_too"
        ),
    ),
    Mutant(
        "round-overtakes-flush",
        "The driver sends a Fetch that carries a read round at once, for a reader waits for it.",
        "etcd's read contexts ride on heartbeats, which acknowledge nothing; a Fetch does both",
        """
        streammeta.controller.runtime.replication.core_loop:
        - if self._must_wait(effect):
        + if self._must_wait(effect) and not getattr(effect.message, 'read_round', 0):
        """,
        Tested(
            "tests/runtime/test_outbox.py"
            "::test_a_request_leaves_when_its_write_is_durable_and_not_before"
        ),
    ),
    Mutant(
        "read-before-own-commit",
        "A new leader reads at its old high watermark before it has committed in its epoch.",
        "Raft thesis, section 6.4; KAFKA-15345 for a claim before catching up",
        """
        streammeta.controller.quorum.leading:
        - if not isinstance(role, roles.Leader) or not self.is_established():
        + if not isinstance(role, roles.Leader):
              replica.emit(events.ReadIndexRejected(read_id))
        """,
        Tested(
            "tests/quorum/test_quorum_replication.py"
            "::test_a_read_is_refused_before_the_leader_has_committed_in_its_epoch"
        ),
    ),
    Mutant(
        "uncommitted-shown",
        "A read is answered from the leader's map before what it shows is committed.",
        "etcd, RethinkDB and others read uncommitted state at some time (Jepsen)",
        """
        streammeta.controller.runtime.writer.controller:
          self._leading_log()
        - answered = self._query_shown(request)
        - if await self._is_committed(answered.offset):
        -     return answered
        + return self._query_shown(request)
        """,
        Tested(
            "tests/runtime/test_runtime_controller.py::test_a_read_never_shows_what_is_not_committed"
        ),
    ),
    Mutant(
        "refusal-from-uncommitted",
        "An answer that changes nothing does not wait for what it was decided on.",
        "a refusal tells of state too; the same family as dirty reads",
        """
        streammeta.controller.runtime.writer.controller:
        - waiting = self._answers.until(end_offset) if end_offset > self._committed_end else None
        + is_news = is_proven and end_offset > self._committed_end
        + waiting = self._answers.until(end_offset) if is_news else None
        """,
        Tested(
            "tests/runtime/test_runtime_controller.py"
            "::test_an_answer_that_changes_nothing_waits_for_what_it_was_decided_on"
        ),
    ),
    Mutant(
        "nothing-undone-on-loss",
        "A leader that loses leadership keeps what it had replayed and not committed.",
        "KAFKA-13100 and KAFKA-13114",
        """
        streammeta.controller.runtime.writer.controller:
        - self._metadata.undo_to(self._committed_end)
          self._log_hash.undo_to(self._committed_end)
        """,
        Tested(
            "tests/runtime/test_runtime_controller.py::test_lost_leadership_undoes_what_was_not_committed"
        ),
    ),
    Mutant(
        "refused-append-leaves-trace",
        "A request whose append is refused stays in the map of the leader.",
        "KAFKA-14996 is of the family of requests too large to append",
        """
        streammeta.controller.runtime.writer.controller:
        - self._metadata.undo_to(offset)
        """,
        Tested("tests/runtime/test_runtime_controller.py::test_a_refused_append_leaves_no_trace"),
    ),
    Mutant(
        "session-read-behind",
        "A read that must see an offset does not wait until that is applied.",
        "the family of stale follower reads",
        """
        streammeta.controller.runtime.writer.controller:
        - await self._applied(at_least)
        """,
        Tested(
            "tests/runtime/test_runtime_controller.py"
            "::test_a_session_read_waits_for_its_offset_on_any_controller"
        ),
    ),
)
