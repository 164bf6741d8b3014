"""Mutants of the connections between controllers: frames, hellos, reports and bounds."""

from tests.mutants.mutant import Mutant, Tested

_FRAMES = "tests/quorum/test_peer_frames.py::"
_PEERS = "tests/quorum/test_quorum_peers.py::"
_SERVER = "tests/quorum/test_peer_server.py::"
_TLS = "tests/quorum/test_peer_tls.py::"

PEERS = (
    Mutant(
        "frame-checksum-unchecked",
        "A frame that was damaged on the way is taken for a sound one.",
        "TCP's checksum misses some of the damage there is (Stone and Partridge, 2000)",
        """
        streammeta.controller.peers.frames:
        - if google_crc32c.extend(google_crc32c.value(fields), payload) != checksum:
        + if checksum < 0:
        """,
        Tested(_FRAMES + "test_every_flipped_bit_of_a_frame_is_noticed"),
    ),
    Mutant(
        "oversized-frame-buffered",
        "A frame's length is believed, and as many bytes are waited for and kept.",
        "KAFKA-4090: a TLS hello to a plain port read as a request of 350 MB",
        """
        streammeta.controller.peers.frames:
        - if length > limit:
        + if length < 0:
        """,
        Tested(_FRAMES + "test_an_oversized_frame_is_refused_from_its_header"),
    ),
    Mutant(
        "batch-checksum-unchecked",
        "Batches of a Fetch go into the log without a look at their checksum.",
        "the reason for checksums from end to end",
        """
        streammeta.controller.peers.wire_parts:
        - if google_crc32c.value(data[start:end]) != checksum:
        + if checksum < 0:
        """,
        Tested("tests/quorum/test_peer_wire.py::test_a_damaged_batch_is_refused"),
    ),
    Mutant(
        "batch-of-before-sent-again",
        "The batch that is kept encoded for the next follower is sent for another at its place.",
        "a cache whose key leaves the epoch out",
        """
        streammeta.controller.peers.wire_parts:
        - if batch is not self._last:
        + if self._last is None or batch.base_offset != self._last.base_offset:
        """,
        Tested(
            "tests/quorum/test_peer_wire.py"
            "::test_a_batch_is_sent_as_itself_whatever_was_sent_before"
        ),
    ),
    Mutant(
        "hello-of-another-cluster-taken",
        "The listener does not compare the hello's cluster with its own.",
        "KIP-78: brokers that join another cluster by a wrong address",
        """
        streammeta.controller.peers.server:
        - if hello.cluster_id != self._server.identity.cluster_id:
        + if not hello.cluster_id:
        """,
        Tested(_SERVER + "test_a_hello_meant_for_another_is_refused_with_the_reason"),
    ),
    Mutant(
        "answerer-not-compared",
        "Any answer to the hello is taken for the peer's.",
        "addresses that moved to another node, as containers' do",
        """
        streammeta.controller.peers.dialled:
        - if answer.refusal is Refusal.ANOTHER_NODE or answer.node_id != peer:
        + if answer.node_id < 0:
        streammeta.controller.peers.transport:
        - if response.header.sender != place.peer:
        + if response.header.sender < 0:
        """,
        Tested(_PEERS + "test_an_address_taken_over_by_another_node_is_left"),
    ),
    Mutant(
        "sender-not-bound-to-its-hello",
        "A request may name another sender than the hello of its connection.",
        "the reason for binding a session to who opened it",
        """
        streammeta.controller.peers.server:
        - if request.header.sender.node_id != sender:
        + if request.header.sender.node_id < 0:
        """,
        Tested(_SERVER + "test_a_bad_request_fails_and_the_connection_goes_on"),
    ),
    Mutant(
        "repeated-frames-taken",
        "A frame that comes twice, or late, is handled again.",
        "replays, against which call ids only ever grow",
        """
        streammeta.controller.peers.server:
        - if frame.call_id <= self._last_call_id:
        + if frame.call_id < 0:
        """,
        Tested(_SERVER + "test_whoever_breaks_the_protocol_is_disconnected"),
    ),
    Mutant(
        "reset-not-reported",
        "The end of a connection fails its requests, and that the peer is gone is not told.",
        "failovers that wait for a timeout although the kernel has told",
        """
        streammeta.controller.peers.transport:
        - was_reset = end is End.LOST and place.purpose is Purpose.CONTROL and not is_retired
        + was_reset = False
        """,
        Tested(_PEERS + "test_a_closed_connection_is_noticed_at_once"),
    ),
    Mutant(
        "refusal-taken-for-silence",
        "A peer whose host refuses connections is not reported as gone.",
        "as above, for a leader that ended before it was spoken to",
        """
        streammeta.controller.peers.transport:
        - if was_reset or (end is End.REFUSED and all_failed):
        + if was_reset:
        """,
        Tested(_PEERS + "test_a_refused_connection_is_noticed_at_once"),
    ),
    Mutant(
        "silent-connection-kept",
        "A request that times out fails alone, and the next goes on the same connection.",
        "TCP's retransmissions back off for minutes; the cut had healed long before",
        """
        streammeta.controller.peers.dialled:
          if self._is_reached:
              self._patience.cut_off()
        - self._end(End.SILENT)
        + call = self._calls.pop(next(iter(self._calls)))
        + self._caller.on_failure(self.place, call.request, "silent")
        """,
        Tested(_PEERS + "test_a_connection_that_carries_nothing_is_not_waited_for"),
    ),
    Mutant(
        "room-of-the-gone-kept",
        "Requests of a connection that ended count as under way for ever.",
        "leaks of permits, after which a server is busy for good",
        """
        streammeta.controller.peers.server:
          for call in calls.values():
        -     call.room.give()
        """,
        Tested(_SERVER + "test_a_flood_of_fetches_leaves_room_for_votes"),
    ),
    Mutant(
        "certificates-not-asked-for",
        "TLS hides what controllers say, and takes every process for one.",
        "CVE-2018-1085: etcd deployed with the check of clients' certificates off",
        """
        streammeta.tls.files:
        - context.verify_mode = ssl.CERT_REQUIRED
        + context.verify_mode = ssl.CERT_NONE
        streammeta.controller.tls.peer_contexts:
        - if transport.get_extra_info("ssl_object") is None:
        + if not transport.get_extra_info("peercert"):
        """,
        Tested(_TLS + "test_who_shows_no_certificate_of_the_authority_is_refused"),
    ),
    Mutant(
        "any-role-speaks-as-a-controller",
        "A broker's certificate whose id is a controller's speaks as that one.",
        "one authority for all: CockroachDB tells nodes from users by more than their names",
        """
        streammeta.controller.tls.peer_contexts:
        - is_controller = accepted is not None and accepted.role is Role.CONTROLLER
        + is_controller = accepted is not None
        """,
        Tested(_TLS + "test_who_is_another_by_its_certificate_is_refused"),
    ),
    Mutant(
        "certificate-of-another-controller-taken",
        "A controller says hello in the name of another, and votes for it.",
        "the reason for etcd's --peer-cert-allowed-cn",
        """
        streammeta.controller.peers.server:
        - if self._certified not in (None, hello.sender):
        + if self._certified is hello:
        """,
        Tested(_TLS + "test_who_is_another_by_its_certificate_is_refused"),
    ),
    Mutant(
        "replaced-by-the-certificate-of-another",
        "A process that can write the files makes a running controller another one.",
        "files of two nodes mixed up by the tool that renews them",
        """
        streammeta.tls.files:
        - if found.principal != self.contents.principal:
        + if found is self.contents:
        """,
        Tested("tests/trust/test_tls_reload.py::test_a_broken_set_stays_out_and_is_told_of_once"),
    ),
    Mutant(
        "token-sent-to-the-port-for-certificates",
        "A follower names the address that asks for a certificate to a caller with a token.",
        "KIP-103: clients are told of the listener that they have come to",
        """
        streammeta.controller.rpc.calls.error_mapping:
        - metadata["leader_endpoint"] = error.token_endpoint  # the other asks for a certificate
        + metadata.setdefault("leader_endpoint", error.token_endpoint)
        """,
        Tested(
            "tests/trust/test_token_calls.py::"
            "test_a_follower_sends_callers_to_the_port_that_takes_what_they_show"
        ),
    ),
    Mutant(
        "address-for-tokens-outlives-its-listener",
        "Callers with tokens are sent to a listener that a controller has no longer.",
        "the same, after a restart with other options",
        """
        streammeta.controller.peers.addresses:
        - self._for_tokens.pop(node_id, None)
        + self._for_tokens.get(node_id)
        """,
        Tested(
            "tests/quorum/test_peer_dialled.py::"
            "test_the_address_for_tokens_is_that_of_the_last_hello_if_it_names_one"
        ),
    ),
)
