"""Demo: real rows pass through a real cluster with faults, and every byte is compared."""
