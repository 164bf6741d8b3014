"""Status pages for people."""
