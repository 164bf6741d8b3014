"""The broker's own registration: its session and its epochs."""
