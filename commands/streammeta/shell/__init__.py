"""Metadata shell: the metadata as a tree of directories and files, and commands to browse it."""
