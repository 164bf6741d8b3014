"""Entry point of the `streammeta` program; names the extra to install where it is missing."""

import os
import sys

from streammeta.storage.errors import MissingPackageError
from streammeta.storage.installation import optional_packages


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 called the wrong way or not installed."""
    # gRPC prints lines of its own on standard error, one for each handshake that fails: whoever
    # reaches a port could fill a log. It reads this when it is loaded.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        with optional_packages("the command line"):
            from streammeta.cli.output import run_cli
            from streammeta.cli.root import cli
    except MissingPackageError as error:
        print(f"streammeta: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_cli(cli))


if __name__ == "__main__":
    main()
