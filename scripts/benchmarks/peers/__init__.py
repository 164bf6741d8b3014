"""Other systems under the same load, as children of the benchmark."""
