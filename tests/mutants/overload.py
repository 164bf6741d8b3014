"""Mutants of what bounds a controller under attack: connections, answers, memory, pings."""

from tests.mutants.mutant import Mutant, Tested

_UNREAD = "tests/attack/test_attack_unread.py::"
_MEMORY = "tests/attack/test_attack_memory.py::"
_PINGS = "tests/rpc/test_connections.py::test_every_ping_is_answered_however_many_come"

OVERLOAD = (
    Mutant(
        "silent-peers-unbounded",
        "One host opens as many connections to the peers' port as it likes, and says nothing.",
        "our own: two of three controllers ended in an election for want of file descriptors",
        """
        streammeta.controller.peers.server:
        - (silent[host], SILENT_MAX_PER_HOST, "of this host without a hello"),
        + (silent[host], CONNECTIONS_MAX, "of this host without a hello"),
        """,
        Tested(
            "tests/quorum/test_peer_server.py::"
            "test_connections_that_say_nothing_leave_room_for_those_that_do"
        ),
    ),
    Mutant(
        "unread-answers-uncounted",
        "Answers are handed to gRPC however many of its caller's are not read yet.",
        "our own: 300 lists of keys on two connections held 1.3 GB",
        """
        streammeta.controller.rpc.calls.interceptors:
        - self._answers.require(holder, size)
        + self._answers.take(holder, size)
        """,
        Tested(_UNREAD + "test_answers_that_are_made_at_the_same_time_are_refused_too"),
    ),
    Mutant(
        "unread-answers-counted-for-good",
        "An answer that was sent is counted on, and its caller refused before long.",
        "leaks of quotas, which show after days",
        """
        streammeta.controller.rpc.calls.interceptors:
        - self._answers.give_back(holder, size)
        + self._answers.give_back(holder, 0)
        """,
        Tested(_UNREAD + "test_answers_that_are_read_are_counted_no_more"),
    ),
    Mutant(
        "pipelines-open-at-the-limit",
        "A pipeline that is open goes on filling the map of a process at its limit of memory.",
        "etcd's quota, which is asked for each write and not for each connection",
        """
        streammeta.controller.rpc.services.commit_pipeline:
        - self._guard.require(MemoryClass.COMMIT)
        + self._guard.require(MemoryClass.VITAL)
        """,
        Tested(_MEMORY + "test_an_open_pipeline_is_refused_at_the_limit_and_taken_before"),
    ),
    Mutant(
        "frequent-pings-closed",
        "A connection of frequent pings is closed, as gRPC's servers do by default.",
        "our own: a flood of pings cost a leader a thread a second, and gigabytes",
        """
        streammeta.controller.grpc_server.http2_connection:
        - self.out.append(frame(Kind.PING, Flag.ACK, 0, payload))
        + self.out.append(self._changes.take(now, "p") or frame(Kind.PING, Flag.ACK, 0, payload))
        """,
        Tested(_PINGS),
    ),
    Mutant(
        "too-many-calls-taken-for-one-too-large",
        "A call that gRPC refuses for the number under way is final: the client gives up.",
        "our own: both come as RESOURCE_EXHAUSTED without a reason",
        """
        streammeta.rpc.failures:
        - return RpcFailure(call.code(), message, Reason.BUSY)
        + return RpcFailure(call.code(), message)
        """,
        Tested(
            "tests/broker_client/test_refused_unread.py::"
            "test_a_call_above_the_number_that_may_be_under_way_is_repeated_until_there_is_room"
        ),
    ),
    Mutant(
        "each-call-taken-for-a-connection",
        "Every call counts as a connection of its own: no connection without a call is told of.",
        "counters of connections that count requests",
        """
        streammeta.controller.rpc.calls.connections_without_calls:
        - if peer in self._known:
        + if not peer:
        """,
        Tested(
            "tests/server/test_uncalled.py::"
            "test_connections_without_a_call_are_counted_and_others_are_not"
        ),
    ),
    Mutant(
        "newer-call-passes-one-that-waits",
        "A waiting commit is passed by newer ones until its deadline.",
        "admission that looks at free places before it looks at its queue",
        """
        streammeta.controller.runtime.load.admission:
        - if not queue and self._has_room(kind):
        + if self._has_room(kind):
        """,
        Tested("tests/runtime/test_admission.py::test_a_newer_call_does_not_pass_one_that_waits"),
    ),
    Mutant(
        "call-leaves-twice",
        "A call that leaves twice frees two places: more run at once than may.",
        "cleanup both at the end of a call and of its connection",
        """
        streammeta.controller.runtime.load.admission:
        - ticket.is_running = False
          self._running[ticket.kind] -= 1
        """,
        Tested("tests/runtime/test_admission.py::test_a_call_leaves_once"),
    ),
)
