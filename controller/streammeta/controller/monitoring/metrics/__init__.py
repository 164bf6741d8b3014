"""Metrics of a controller, read at each scrape."""
