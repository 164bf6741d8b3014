"""Looking into stored objects: what is in one, sound or not, and what its payloads are."""
