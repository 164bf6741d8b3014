"""The broker's client in one object."""
