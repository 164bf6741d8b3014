"""The quorum's own transport between controllers: frames, codec, connections, listener."""
