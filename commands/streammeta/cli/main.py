"""Entry point of the `streammeta` program; names the extra to install where it is missing."""

import gc
import os
import sys

from streammeta.storage.errors import MissingPackageError
from streammeta.storage.installation import optional_packages

GRPC_SETTINGS = {
    # gRPC prints a line of its own on standard error for each handshake that fails: a stranger
    # could fill a log.
    "GRPC_VERBOSITY": "NONE",
    # Only ciphers of older versions than TLS 1.3 can be set: this one needs a secret that is
    # never there, so that there is no older version.
    "GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-CHACHA20-POLY1305",
}
"""Settings of gRPC that it takes from the environment alone, when it is loaded."""

COLLECTED_EVERY = 10_000
"""New objects between two collections of garbage. With Python's own number, 700, a tenth of the
time of loading modules goes to collections, which find none."""


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 called the wrong way or not installed."""
    gc.set_threshold(COLLECTED_EVERY)
    os.environ.update(GRPC_SETTINGS | os.environ)
    try:
        with optional_packages("the command line"):
            from streammeta.cli.framework.output import run_cli
            from streammeta.cli.root import cli
    except MissingPackageError as error:
        print(f"streammeta: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_cli(cli))


if __name__ == "__main__":
    main()
