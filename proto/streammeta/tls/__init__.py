"""TLS for every listener and client: files, identities, handshakes and listeners."""
