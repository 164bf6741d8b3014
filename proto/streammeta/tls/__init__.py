"""TLS for every listener and client: files, identities, handshakes, listeners."""
