"""Mutants of probes and of the listener that answers them."""

from tests.mutants.mutant import Mutant, Tested

_PLANE = "tests/monitoring/test_http_plane.py::"

MONITORING = (
    Mutant(
        "lost-leader-remembered",
        "A voter without answers says that there is a leader: it is ready, and no alert fires.",
        "its role goes to and fro between follower and prospective, with the old leader's id",
        """
        streammeta.controller.runtime.replication.operations:
        - return follower.has_fetched and not follower.leader_ended
        + return follower.leader_id >= 0
        """,
        Tested(
            "tests/runtime/test_driver_operations.py::"
            "test_a_follower_alone_has_no_leader_although_it_remembers_one"
        ),
    ),
    Mutant(
        "metrics-for-every-certificate",
        "A page is given to every caller with a certificate of the authority, denied or not.",
        "a authenticator that is left open when a second listener is added",
        """
        streammeta.controller.monitoring.http.http_listener:
        - self._authenticator.authenticate(rule, context)
        + self._authenticator.long_call(rule, context)
        """,
        Tested(_PLANE + "test_pages_are_for_roles"),
    ),
    Mutant(
        "slow-request-never-ends",
        "A connection that sends its request slowly, or reads its answer slowly, stays for ever.",
        "Slowloris (2009); aiohttp and uvicorn have no limit of their own",
        """
        streammeta.controller.monitoring.http.http_listener:
        - connection.transport.abort()
        + connection.transport.is_closing()
        """,
        Tested(_PLANE + "test_a_connection_ends_soon_whatever_it_sends_or_reads"),
    ),
    Mutant(
        "http-takes-all-that-is-sent",
        "What is sent behind a request that is refused stays in memory while its connection does.",
        "aiohttp keeps an error for each piece that it can't parse, and each keeps its bytes",
        """
        streammeta.controller.monitoring.http.http_listener:
        - self._left -= len(data)
        + self._left -= 0
        """,
        Tested(_PLANE + "test_a_connection_that_sends_too_much_is_ended"),
    ),
    Mutant(
        "descriptors-of-http-forgotten",
        "Connections of clients may take descriptors that probes take too: the log has none left.",
        "a listener that is added to those among which descriptors were shared out",
        """
        streammeta.controller.runtime.load.descriptors:
        - kept = KEPT + KEPT_FOR_HTTP if serves_http else KEPT
        + kept = KEPT
        """,
        Tested(
            "tests/runtime/test_descriptors.py::test_connections_leave_room_for_those_of_http_too"
        ),
    ),
    Mutant(
        "new-certificate-not-shown",
        "The listener for HTTP goes on with the certificate of the start until it has expired.",
        "prometheus_client's server and many exporters read their files once",
        """
        streammeta.controller.tls.manager:
        - self.http.takes_plain_text = False
          use(used.contents)
        - used.users.append(use)
        + self.http.takes_plain_text = False
        """,
        Tested(_PLANE + "test_replaced_certificates_are_shown_and_broken_ones_are_not"),
    ),
)
