"""gRPC over HTTP/2 for clients, served on the event loop."""
