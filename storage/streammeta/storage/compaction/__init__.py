"""Pure planning of compaction: which bytes of which objects are rewritten together."""
