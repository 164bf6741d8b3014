"""TLS for every listener and client: files, identities, handshakes and listeners.

Knows no configuration and no policy of a controller, because clients without a controller use it.
`streammeta.controller.tls` has those parts.
"""
