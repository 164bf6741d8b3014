"""Records of the log: as values, as bytes, and selections of them."""
