"""The broker process: listeners, connections, authentication, metrics."""
