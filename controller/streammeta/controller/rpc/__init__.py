"""The door: gRPC in, gRPC out. Translates and waits, never decides."""
