"""gRPC services of a controller, and its calls to peers. Translates and waits, never decides."""
