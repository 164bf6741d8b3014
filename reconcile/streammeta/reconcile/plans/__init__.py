"""Plan folders: layout, reading, and history."""
