"""gRPC services of a controller. Translates and waits, never decides."""
