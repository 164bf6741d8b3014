"""Drills: what operators rarely do, practised on real controllers of this machine under load."""
