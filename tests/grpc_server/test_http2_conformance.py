"""Cases of h2spec, which break RFC 9113 and RFC 7541 one by one, at a call of gRPC."""

import json
import re
from pathlib import Path

import pytest

from tests.grpc_server.interop_service import ROOT, interop_server, program_in_go, run_program

CASES = 146
"""Cases of h2spec, those of its strict mode too."""

DECISION = ROOT / "docs" / "decisions" / "0018-clients-are-served-on-the-event-loop.md"
"""The decision names the cases that the server fails on purpose, and says why."""


@pytest.mark.process
async def test_h2spec_finds_no_fault_but_those_that_were_decided(tmp_path: Path) -> None:
    program = program_in_go("h2spec")
    decided = re.findall(r"`((?:generic|http2|hpack)/[\d./]+)`", DECISION.read_text())
    async with interop_server(tmp_path) as endpoint:
        host, _, port = endpoint.rpartition(":")
        # It answers without a message, as cases that end their request with its headers need.
        path = "/grpc.testing.TestService/StreamingInputCall"
        code, out, errors = await run_program(program, host, port, path, *decided)
    assert code == 0, errors
    results = json.loads(out)
    assert {name: text for name, text in results.items() if text != "passed"} == {}
    assert len(results) + len(decided) == CASES
