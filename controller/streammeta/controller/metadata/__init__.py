"""The map: decides requests into records, replays records into columns. No I/O, no clock."""
