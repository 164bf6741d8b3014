"""The demo: real rows through a real cluster, with faults, compared to the last byte."""
