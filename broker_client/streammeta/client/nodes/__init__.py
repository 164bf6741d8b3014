"""Registration of a broker: its session and its epochs."""
