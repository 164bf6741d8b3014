"""Findings beyond a listing's rows: losses, damaged objects, unfinished uploads."""
