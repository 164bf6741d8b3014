"""Mutants of fences of brokers: epochs of processes and streams, registrations, releases."""

from tests.mutants.mutant import Mutant, Tested

_PROCESSES = "tests/metadata/test_node_processes.py"
_REOPENED = "tests/metadata/test_reopened_streams.py"
_RECOVERERS = "tests/metadata/test_recoverers.py"
_FAILOVER = "tests/broker_client/test_object_log_failover.py"
_RETURNING_SIM = (
    "tests/broker_client/test_returning_logs_sim.py"
    "::test_records_under_logs_that_return_are_read_or_set_aside"
)
_RETURNING = "tests/broker_client/test_returning_logs.py"

FENCES = (
    Mutant(
        "inherited-streams-keep-their-epochs",
        "A new process goes on under the epochs of an earlier one, whose log then counts as its.",
        "found by a log whose volume was not mounted for one start of its broker",
        """
        streammeta.client.nodes.session:
        - return replace(session, inherited=await session._take_over(listed))
        + return replace(session, inherited=tuple(listed))
        """,
        Tested(f"{_RETURNING}::test_a_log_that_returns_after_others_wrote_is_set_aside_whole"),
    ),
    Mutant(
        "offsets-below-the-end-are-ones-own",
        "A record of an earlier epoch counts as committed wherever the stream holds its offset.",
        "the second half of the same fault: three acknowledged records were dropped silently",
        """
        streammeta.client.wal.disk.recovery:
        - if record.end_offset > self._comparison.equal_to.get(key, least):
        + if record.end_offset > history.end_offset:
        """,
        Tested(f"{_RETURNING}::test_a_log_that_returns_after_others_wrote_is_set_aside_whole"),
    ),
    Mutant(
        "spliced-behind-another-writer",
        "A record is uploaded because it begins at the stream's end, whoever wrote what is before.",
        "the first half of the same fault: two records of a lost run were spliced in",
        """
        streammeta.client.wal.disk.recovery:
        - return record.base_offset == end == self._reach(record, largest_end)
        + return record.base_offset == end
        """,
        Tested(f"{_RETURNING}::test_a_log_that_returns_after_others_wrote_is_set_aside_whole"),
    ),
    Mutant(
        "compared-without-payload",
        "A record counts as stored if one of its offsets is, with whatever bytes.",
        "a comparison of offsets, as before",
        """
        streammeta.client.wal.disk.stored_records:
        - wanted = (record.base_offset, record.count, record.payload)
        + found = found[:1] and [record]
        + wanted = (record.base_offset, record.count, record.payload)
        """,
        Tested(f"{_RETURNING}::test_a_log_that_returns_after_others_wrote_is_set_aside_whole"),
    ),
    Mutant(
        "given-up-records-come-back",
        "After a failed write records of the older epoch take the offsets of the newer one's.",
        "a log that is read in order, without looking at what its process did next",
        """
        streammeta.client.wal.disk.recovery:
        - if self._newest.get(record.stream_id, record.epoch) > record.epoch:
        -     return False
        """,
        Tested(f"{_RETURNING}::test_records_that_their_own_process_gave_up_are_not_continued"),
    ),
    Mutant(
        "doubt-is-forgotten",
        "A record that differs from the stored one does not bar the records behind it.",
        "each record judged for itself",
        """
        streammeta.client.wal.disk.recovery:
        - self.differing.add(key)
        + pass
        """,
        Tested(f"{_RETURNING}::test_a_range_that_was_dropped_leaves_its_records_in_doubt"),
    ),
    Mutant(
        "process-of-a-used-epoch-registers",
        "A second process of a node epoch registers: it and the first one write the same streams.",
        "two machines with a copy of one write-ahead log and a fixed node epoch",
        """
        streammeta.controller.metadata.registries.nodes:
        - if process_id != node.process_id:
        + if False:
        """,
        Tested(
            f"{_PROCESSES}::test_another_process_of_the_same_epoch_is_refused_and_changes_nothing"
        ),
    ),
    Mutant(
        "registration-without-a-process-is-refused",
        "A client that names no process can't repeat its registration.",
        "an older client, or a tool, that registers again to change tags",
        """
        streammeta.controller.metadata.registries.nodes:
        - process_id = process_id or node.process_id
        """,
        Tested(f"{_PROCESSES}::test_a_process_that_does_not_say_which_it_is_changes_no_owner"),
    ),
    Mutant(
        "process-of-an-epoch-not-in-checkpoints",
        "After a restart from a checkpoint a second process of an epoch registers.",
        "a field added to the state and forgotten in the snapshot",
        """
        streammeta.controller.metadata.sections.restore:
        - return [replace(node, process_id=known.get(node.node_id, "")) for node in nodes]
        + return list(nodes)
        """,
        Tested(
            f"{_PROCESSES}::test_another_process_of_the_same_epoch_is_refused_and_changes_nothing"
        ),
    ),
    Mutant(
        "started-without-the-log",
        "A broker starts without the log that its node has registered, and takes its offsets.",
        "an empty directory because a volume was not mounted",
        """
        streammeta.client.wal.registered_log:
        - if may_hold_records and not known:
        + if may_hold_records and not known and wal_config == NO_LOG:
        """,
        Tested(
            "tests/broker_client/test_missing_logs.py::"
            "test_a_node_with_open_streams_does_not_start_without_its_log"
        ),
    ),
    Mutant(
        "released-though-it-owes",
        "The streams of a silent node are closed though it owes uploads.",
        "a look at the registration instead of the state",
        """
        streammeta.controller.metadata.registries.stream_decisions:
        - if error is ErrorCode.NONE and len(self._streams.active_uploads(request.node.node_id)):
        -     error = ErrorCode.STREAM_NOT_CLOSED
        """,
        Tested(f"{_RECOVERERS}::test_a_newer_process_is_not_released_nor_one_that_owes_uploads"),
    ),
    Mutant(
        "released-and-not-fenced",
        "A silent node's streams are closed, and the process goes on as if they were its own.",
        "half of a fence",
        """
        streammeta.controller.metadata.registries.stream_decisions:
        - if fence is not None:
        -     records.append(fence)
        + del fence
        """,
        Tested(f"{_RECOVERERS}::test_a_node_that_is_gone_is_fenced_and_its_streams_are_closed"),
    ),
    Mutant(
        "node-without-a-log-waits-for-ever",
        "A node that has no log is left to brokers that recover logs, and its streams stay open.",
        "brokers that were closed in good order: their streams could not be taken over",
        """
        streammeta.controller.lifecycle.assignments:
        - return node.wal_config == NO_LOG and node.pending_upload_count == 0
        + return False
        """,
        Tested(
            "tests/lifecycle/test_lifecycle_failover.py::"
            "test_the_streams_of_a_node_without_a_log_are_closed_and_nobody_recovers_it"
        ),
    ),
    Mutant(
        "one-recovery-holds-up-all",
        "A recovery that can't be done keeps its target's only place, and others wait for ever.",
        "a broker whose log is on its disk, assigned to the only one that lives",
        """
        streammeta.controller.lifecycle.assignments:
        - load[node.recovered_by] += node.node_id not in stalled
        + load[node.recovered_by] += 1
        """,
        Tested(
            "tests/lifecycle/test_lifecycle_failover.py::"
            "test_a_recovery_that_never_ends_does_not_hold_up_others"
        ),
    ),
    Mutant(
        "fenced-node-opens-again",
        "A process that another recovers lists its streams under its old epoch and goes on.",
        "GetOpeningStreams set the flag that its caller gave, whoever that was",
        """
        streammeta.controller.metadata.registries.nodes:
        - error = self._check_registration(identity, fence_failover=not failover)
        + error = self._check_registration(identity, fence_failover=False)
        """,
        Tested(f"{_RECOVERERS}::test_a_fenced_process_does_not_lift_its_own_fence"),
    ),
    Mutant(
        "fenced-node-registers-again",
        "A process that is fenced, or has unregistered, replaces its registration.",
        "the relative of the above; its log's place is what a recoverer looks for",
        """
        streammeta.controller.metadata.registries.nodes:
        - error = self._check_registration(identity)
        + error = self._check_registration(identity, fence_failover=False)
        """,
        Tested(f"{_RECOVERERS}::test_a_process_that_has_unregistered_does_not_come_back"),
    ),
    Mutant(
        "any-node-reopens",
        "A node that says so takes a stream that another has open.",
        "the wish of an owner passes for ownership",
        """
        streammeta.controller.metadata.registries.stream_decisions:
        - elif head.state == StreamState.OPENED and not (item.reopen and head.node_id == node_id):
        + elif head.state == StreamState.OPENED and not item.reopen:
        """,
        Tested(
            f"{_REOPENED}::"
            "test_an_open_stream_is_refused_without_the_owners_wish_and_to_any_other_node"
        ),
    ),
    Mutant(
        "failover-uploads-under-an-older-epoch",
        "A recovery uploads records under the epoch of their process, which is not in force.",
        "found by simulation: a node that died in its second start could never be recovered",
        """
        streammeta.client.wal.bucket.failover:
        - current = replace(record, epoch=self._pending[record.stream_id].epoch)
        + current = replace(record)
        """,
        Tested(
            f"{_FAILOVER}::test_records_of_an_earlier_process_are_uploaded_under_the_epoch_in_force"
        ),
    ),
    Mutant(
        "records-set-aside-nowhere",
        "The records that a recovery can't commit are counted, and are in no file.",
        "a log whose volume was not mounted for one start of its broker",
        """
        streammeta.client.wal.disk.recovery:
        - sorting.report.file = await log.set_aside(unwanted, "found at the start of a broker")
        + sorting.report.file = await log.set_aside(list(unwanted)[:0], "none")
        """,
        Tested(_RETURNING_SIM),
    ),
    Mutant(
        "recovered-log-trimmed-before-its-commits",
        "A log is trimmed while its records wait for their upload, and the process dies.",
        "a trim that was moved in front of the flush",
        """
        streammeta.client.writing.writer:
        - await self.flush()
          # Callbacks of futures that are done run one iteration of the loop later.
        """,
        Tested(_RETURNING_SIM),
    ),
    Mutant(
        "interrupted-uploads-are-not-compared",
        "What an interrupted recovery has committed is set aside by the next one.",
        "a recovery that looks at offsets alone, and can't know whose records are there",
        """
        streammeta.client.writing.writer:
        - report = await recover_into(self._log, self._session, upload, self._threads.store)
        + report = await recover_into(self._log, self._session, upload)
        """,
        Tested(_RETURNING_SIM),
    ),
)
