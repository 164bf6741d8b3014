"""gRPC as clients and controllers share it: connections, failures, and the way to the leader."""
