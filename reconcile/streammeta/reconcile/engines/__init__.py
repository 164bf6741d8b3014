"""Engines that join and delete: the process itself, and Spark."""
