"""Transport between controllers: frames, codec, connections, listener."""
