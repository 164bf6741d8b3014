"""Reports of a plan: figures and an HTML page."""
