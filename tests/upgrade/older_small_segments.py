"""The older version with log segments of a few KiB, so that snapshots go between the versions."""

from tests.upgrade.older_controller import be_older

if __name__ == "__main__":
    be_older()
    from streammeta.cli.main import main
    from tests.chaos.small_segments import use_small_segments

    use_small_segments()
    main()
