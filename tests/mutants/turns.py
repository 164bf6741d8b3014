"""Mutants of the work that clients cause in a turn of the event loop, and of listeners' shares."""

from tests.mutants.mutant import Mutant, Tested

_TURNS = "tests/grpc_server/test_turns.py::"
_PAYLOAD = _TURNS + "test_no_payload_takes_more_work_of_a_turn_than_its_bound"
_HANDSHAKES = "tests/trust/test_handshake_places.py::"
_SHARES = "tests/grpc_server/test_listener_shares.py::"

TURNS = (
    Mutant(
        "visited-streams-cost-nothing",
        "A window in SETTINGS sends bytes of a thousand streams for the price of one frame.",
        "measured: 164 kB of settings took 10 s of a leader's CPU, and its leadership",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self.spent += 1 + self._send_next()
        + self._send_next()
        """,
        Tested(_PAYLOAD + "[windows-that-grow]"),
    ),
    Mutant(
        "every-window-visits-all-streams",
        "A larger window of the connection visits each stream whose own window is closed.",
        "measured: 1,000 such frames took 0.3 s",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self.window += grant
        + self.window += grant + sum(map(self._send_unsent, list(self._stalled.values())))
        """,
        Tested(_PAYLOAD + "[windows-of-the-connection]"),
    ),
    Mutant(
        "headers-charged-by-bytes",
        "A block of one-byte references costs as little as its bytes.",
        "measured: 2 kB of references took 10 ms, before anybody had said who they are",
        """
        streammeta.controller.grpc_server.headers:
        - self.steps += len(found)
        """,
        Tested(_PAYLOAD + "[references]"),
    ),
    Mutant(
        "skipped-headers-without-an-end",
        "A block that is passed over may have any number of headers.",
        "measured: 1 MB of small entries took 1 s",
        """
        streammeta.controller.grpc_server.headers:
        - if self._fields > FIELDS_MAX:
        + if self._fields > FIELDS_MAX << 20:
        """,
        Tested(_PAYLOAD + "[skipped-entries]"),
    ),
    Mutant(
        "table-updates-without-an-end",
        "A block may begin with any number of changes of the table's size.",
        "measured: 32 kB of them took 25 ms",
        """
        streammeta.controller.grpc_server.headers:
          updates += 1
        - if updates > TABLE_UPDATES_MAX:
        + if updates > TABLE_UPDATES_MAX << 20:
        """,
        Tested(_PAYLOAD + "[table-updates]"),
    ),
    Mutant(
        "skipped-table-updates-without-an-end",
        "A block that is passed over decodes any number of changes of the table's size.",
        "measured: 1 MB of them took 1.7 s",
        """
        streammeta.controller.grpc_server.headers:
        - if self._updates > TABLE_UPDATES_MAX:
        + if self._updates > TABLE_UPDATES_MAX << 20:
        """,
        Tested(_PAYLOAD + "[skipped-table-updates]"),
    ),
    Mutant(
        "empty-messages-cost-nothing",
        "A frame of 3,276 empty messages costs as much as a frame of one.",
        "a frame of the transport taken for the unit of work",
        """
        streammeta.controller.grpc_server.call:
        - self._connection.session.spent += len(messages) // MESSAGES_A_UNIT
        """,
        Tested(_PAYLOAD + "[empty-messages]"),
    ),
    Mutant(
        "handler-that-never-waits",
        "A handler takes all messages of a stream in one turn of the event loop.",
        "async iterators that never suspend",
        """
        streammeta.controller.grpc_server.call:
        - server.budget.units -= 1
        + pass
        """,
        Tested(
            _TURNS
            + "test_a_handler_that_never_waits_takes_no_more_messages_than_a_turn_has_room_for"
        ),
    ),
    Mutant(
        "handlers-run-into-debt",
        "Many handlers with messages waiting keep all connections from their turns.",
        "review: 3,000 streams of small messages left a bystander without a turn for 156 turns",
        """
        streammeta.controller.grpc_server.call:
        - if not self._queue:
        -     return None
        + server.budget.units -= 1
        """,
        Tested(_TURNS + "test_many_handlers_that_never_wait_leave_connections_their_turn"),
    ),
    Mutant(
        "stopped-process-pays-for-its-sleep",
        "A process that was stopped for a minute takes no work for thousands of turns.",
        "a wall clock taken for work",
        """
        streammeta.controller.grpc_server.shares:
        - self._left_s = max(self._left_s - seconds, -_DEBT_TURNS * self._seconds)
        + self._left_s -= seconds
        """,
        Tested(_TURNS + "test_a_process_that_was_stopped_takes_work_again_soon"),
    ),
    Mutant(
        "arrivals-outside-the-budget",
        "Frames are handled as they arrive, whatever other connections took of the turn.",
        "measured: ten connections added up to 3.2 s, a bystander waited 39 s",
        """
        streammeta.controller.grpc_server.server:
        - if self._queue or self.budget.is_spent:
        + if self._queue is None:
        streammeta.controller.grpc_server.server:
        - more = connection.work(min(budget.units, self.limits.work_of_connection))
        + more = connection.work(self.limits.work_of_connection)
        """,
        Tested(_TURNS + "test_connections_share_the_work_of_a_turn[references]"),
    ),
    Mutant(
        "work-not-drawn-from-the-budget",
        "Connections each have their own share of a turn, and as many shares as connections.",
        "a bound a connection where the event loop is one",
        """
        streammeta.controller.grpc_server.server:
        - if budget.spend(connection.session.spent, monotonic() - begun) or more:
        + if budget.spend(1, monotonic() - begun) or more:
        """,
        Tested(_TURNS + "test_connections_share_the_work_of_a_turn[pings]"),
    ),
    Mutant(
        "long-turns-in-a-row",
        "Each turn of the event loop goes on with clients' work, however long the last one was.",
        "our own: the quorum's messages take several turns each",
        """
        streammeta.controller.grpc_server.shares:
        - self.units = min(0, self.units) + self._units
        + self.units = self._units
        """,
        Tested(_TURNS + "test_turns_after_a_long_one_are_left_to_others"),
    ),
    Mutant(
        "arrivals-pass-those-that-wait",
        "A client whose bytes keep coming has the room of each turn before those that wait.",
        "a fast path without a look at its queue",
        """
        streammeta.controller.grpc_server.server:
        - if self._queue or self.budget.is_spent:
        + if self.budget.is_spent:
        """,
        Tested(_TURNS + "test_frames_that_come_later_wait_behind_those_that_wait"),
    ),
    Mutant(
        "lost-connection-ends-all-calls-at-once",
        "The end of a connection cancels all its calls in one turn.",
        "cleanup without a bound",
        """
        streammeta.controller.grpc_server.http2_connection:
        - while self.streams and self.spent < units:
        + while self.streams:
        """,
        Tested(_TURNS + "test_the_end_of_a_connection_ends_its_calls_by_turns"),
    ),
    Mutant(
        "probes-begun-without-a-bound",
        "All probes and heartbeats that come at once are begun in one turn.",
        "a priority that has no bound of its own",
        """
        streammeta.controller.grpc_server.server:
        - if share.priority or self._begun_priority >= limits.begun_a_turn:
        + if share.priority:
        """,
        Tested(_TURNS + "test_calls_that_others_do_not_hold_up_are_begun_by_turns_too"),
    ),
    Mutant(
        "connections-wait-in-one-line",
        "A listener's connections wait behind all of a crowd at another listener.",
        "first come, first served, where one side comes a thousand times",
        """
        streammeta.controller.grpc_server.shares:
        - callers = self._shares.setdefault(connection.share, {})
        + callers = self._shares.setdefault(next(iter(self._shares), connection.share), {})
        """,
        Tested(_TURNS + "test_a_listener_has_its_turn_however_many_wait_at_another"),
    ),
    Mutant(
        "callers-wait-in-one-line",
        "A caller waits behind all connections of another.",
        "fairness among connections, of which anybody may have many",
        """
        streammeta.controller.grpc_server.shares:
        - callers.setdefault(connection.caller, deque()).append(connection)
        + callers.setdefault("", deque()).append(connection)
        """,
        Tested(_TURNS + "test_a_caller_has_its_turn_however_many_connections_another_has"),
    ),
    Mutant(
        "connections-of-all-listeners",
        "A listener without room for strangers closes the listener for brokers too.",
        "measured: 700 idle connections without a token shut out brokers with certificates",
        """
        streammeta.controller.grpc_server.server:
        - has_room=lambda handshakes: share.connections + handshakes < limits.connections,
        + has_room=lambda handshakes: len(self.connections) + handshakes < limits.connections,
        """,
        Tested(_SHARES + "test_a_listener_that_is_full_leaves_another_its_connections"),
    ),
    Mutant(
        "calls-of-all-listeners",
        "Calls that strangers never complete leave brokers none.",
        "a bound of the process that the first to come uses up",
        """
        streammeta.controller.grpc_server.shares:
        - self.calls_max = max(1, self._limits.calls // listeners)
        + self.calls_max = max(1, self._limits.calls)
        """,
        Tested(_SHARES + "test_calls_at_one_listener_leave_another_its_own"),
    ),
    Mutant(
        "memory-of-all-listeners",
        "Requests that strangers never complete leave brokers no memory for theirs.",
        "the same of bytes",
        """
        streammeta.controller.grpc_server.shares:
        - self.held_max = self._limits.held_bytes // listeners
        + self.held_max = self._limits.held_bytes
        """,
        Tested(_SHARES + "test_requests_that_are_never_complete_leave_another_listener_its_memory"),
    ),
    Mutant(
        "handshakes-computed-as-they-come",
        "Handshakes that were held back are all computed in the turn in which they come.",
        "measured: 400 of them took 110 ms, before anybody had shown a certificate",
        """
        streammeta.tls.listener:
        - await wait_for_hello(opened)
        """,
        Tested(_HANDSHAKES + "test_a_handshake_begins_once_its_first_message_is_there"),
    ),
    Mutant(
        "handshakes-begun-at-once",
        "As many handshakes as have places begin in one turn.",
        "a bound on how many there are that is none on when",
        """
        streammeta.tls.handshakes:
        - while self._taken.total() < COMPUTED_MAX and self._begun < BEGUN_A_TURN:
        + while self._taken.total() < COMPUTED_MAX:
        """,
        Tested(_HANDSHAKES + "test_few_handshakes_begin_in_a_turn"),
    ),
    Mutant(
        "one-host-takes-all-places",
        "Handshakes of one host, which it never completes, hold up those of all others.",
        "slow handshakes of one machine",
        """
        streammeta.tls.handshakes:
        - if self._taken[host] < COMPUTED_MAX_PER_HOST:
        + if self._taken[host] < COMPUTED_MAX:
        """,
        Tested(_HANDSHAKES + "test_a_host_has_its_place_however_many_come_from_another"),
    ),
    Mutant(
        "requests-of-strangers-read",
        "A Kafka-shaped broker reads long lists for clients that have not authenticated.",
        "measured: 64 KiB took 20 ms on each connection",
        """
        streammeta.brokers.kafka.service.server:
        - return read_request(frame, APIS_BEFORE)
        + return read_request(frame)
        """,
        Tested(
            "tests/brokers/test_kafka_hostile.py"
            "::test_requests_of_strangers_are_not_read_but_for_those_that_authenticate"
        ),
    ),
)
