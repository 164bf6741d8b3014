"""The `streammeta` command."""
