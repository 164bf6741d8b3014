"""Benchmarks: real controllers on this machine, measured from outside."""
