"""Cases of two suites: gRPC's interoperability by grpc-go, and h2spec for RFC 9113 and 7541."""

import json
import re
from pathlib import Path

import pytest

from tests.grpc_server.interop_service import ROOT, interop_server, program_in_go, run_program

GRPC_CASES = 17
"""Cases of the suite that need no credentials, and two of load."""


@pytest.mark.process
async def test_grpc_go_passes_every_case_that_needs_no_credentials(tmp_path: Path) -> None:
    program = program_in_go("grpc")
    _, names, _ = await run_program(program, "--cases")
    async with interop_server(tmp_path) as endpoint:
        failed = {}
        for name in names.split():
            code, _, errors = await run_program(program, endpoint, name)
            if code:
                failed[name] = errors
    assert failed == {}
    assert len(names.split()) == GRPC_CASES


H2SPEC_CASES = 146
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
    assert len(results) + len(decided) == H2SPEC_CASES
