"""Entry point of the `streammeta` program. It names the extra of a missing package."""

import gc
import os
import sys

from streammeta.storage import errors, installation

GRPC_SETTINGS = {
    # gRPC prints a line of its own on standard error for each handshake that fails: a stranger
    # could fill a log.
    "GRPC_VERBOSITY": "NONE",
    # Only ciphers of older versions than TLS 1.3 can be set: this one needs a secret that is
    # never there, so that there is no older version.
    "GRPC_SSL_CIPHER_SUITES": "ECDHE-PSK-CHACHA20-POLY1305",
}
"""Settings of gRPC that it reads only from the environment, when it is loaded."""

COLLECTED_EVERY = 10_000
"""New objects between two garbage collections. With Python's default, 700, collections that find no
garbage take a tenth of the time of loading modules.
"""


def main() -> None:
    """Run the command line and exit: 0 success, 1 failure, 2 usage error or missing package."""
    gc.set_threshold(COLLECTED_EVERY)
    # gRPC reads these when it is imported below. Values that the user has set have precedence.
    os.environ.update(GRPC_SETTINGS | os.environ)
    try:
        # Everything below needs packages, and a missing one is reported as a sentence.
        with installation.optional_packages("the command line"):
            from streammeta.cli.framework.output import run_cli
            from streammeta.cli.root import cli
    except errors.MissingPackageError as error:
        print(f"streammeta: {error}", file=sys.stderr)
        sys.exit(2)
    sys.exit(run_cli(cli))


if __name__ == "__main__":
    main()
