"""Third plane of a controller: probes and metrics over HTTP."""
