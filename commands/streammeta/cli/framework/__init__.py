"""Parts that every command shares: output, connections, profiles, settings."""
