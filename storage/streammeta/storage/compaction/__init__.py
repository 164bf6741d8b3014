"""What compaction decides: which bytes of which objects go together, and in what order."""
