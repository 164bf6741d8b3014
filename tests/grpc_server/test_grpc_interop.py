"""Cases of gRPC's own interoperability suite, by grpc-go's client."""

from pathlib import Path

import pytest

from tests.grpc_server.interop_service import interop_server, program_in_go, run_program

CASES = 17
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
    assert len(names.split()) == CASES
