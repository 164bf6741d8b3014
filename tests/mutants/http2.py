"""Mutants of the gRPC server's HTTP/2: rules of RFC 9113, and what a hostile client is charged."""

from tests.mutants.mutant import Mutant, Tested

_SESSION = "tests/grpc_server/test_http2_session.py::"

HTTP2 = (
    Mutant(
        "data-before-the-acknowledgement",
        "Data that a new window allows comes before the acknowledgement of the settings.",
        "measured: clients on Python's h2 end the connection",
        """
        streammeta.controller.grpc_server.session:
        - self.out.append(frame(Kind.SETTINGS, Flag.ACK, 0))
          self._change_window(window)
        + self.out.append(frame(Kind.SETTINGS, Flag.ACK, 0))
        """,
        Tested(_SESSION + "test_data_that_settings_allow_comes_after_their_acknowledgement"),
    ),
)
