"""Metadata shell: the map as a tree of directories and files, and commands to walk it."""
