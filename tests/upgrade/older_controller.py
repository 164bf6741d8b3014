"""The product's commands as an older version: feature level 1 alone, and hellos of version 1.

Started instead of `streammeta.cli.main`. Nothing else differs: the formats at level 1 are those of
the version before. To be replaced by the wheel of a release once there is one that has levels.
"""

from unittest.mock import patch

from streammeta.controller import features

LEVELS = features.Levels(features.BASE_LEVEL, features.BASE_LEVEL)


def be_older() -> None:
    """Change this process, before anything else of the product is imported."""
    features.SUPPORTED = LEVELS
    from streammeta.controller.peers import hello

    hello.VERSION = hello.OLDEST_VERSION
    from streammeta.controller.peers import server

    judged = server._AcceptedConnection._refusal

    def refusal(self: server._AcceptedConnection, asked: hello.Hello) -> hello.Refusal:
        if asked.version != hello.OLDEST_VERSION:
            return hello.Refusal.UNKNOWN_VERSION
        return judged(self, asked)

    patch.object(server._AcceptedConnection, "_refusal", refusal).start()


if __name__ == "__main__":
    be_older()
    from streammeta.cli.main import main

    main()
