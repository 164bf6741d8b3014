"""Connections to the controllers: discovery, calls and watches."""
