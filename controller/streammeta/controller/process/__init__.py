"""One controller process: its composition root, its start and its stop."""
