"""A broker's local write-ahead log: records survive the process before any object contains them."""
