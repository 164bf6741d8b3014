"""The HTTP listener, its probes, and the bound on the work of its pages."""
