"""Other systems under the same load, started as children of the benchmark."""
