"""Drills: rare tasks of operators, practised on real controllers under load."""
