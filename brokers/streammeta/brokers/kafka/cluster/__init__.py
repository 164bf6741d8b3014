"""The broker in its cluster: its view of the metadata, its keys and topics."""
