"""The product's commands with log segments of a few KiB, so that a short run trims its log.

Started instead of `streammeta.cli.main`: a controller whose log is trimmed sends snapshots to those
who were away, which would otherwise take 64 MiB of writes. Nothing else differs.
"""

from streammeta.cli.main import main
from streammeta.controller.journal.journal import Journal

SEGMENT_BYTES = 16 * 1024


def use_small_segments() -> None:
    """Change the default of `Journal.open` in this process."""
    defaults = Journal.open.__func__.__kwdefaults__  # type: ignore[attr-defined]
    assert "segment_bytes" in defaults
    defaults["segment_bytes"] = SEGMENT_BYTES


if __name__ == "__main__":
    use_small_segments()
    main()
