"""The contract: protobuf messages and services, with the stubs generated from them."""
