"""gRPC for clients and controllers: connections, failures, the search for the leader."""
