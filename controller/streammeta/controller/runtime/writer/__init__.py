"""The single writer: requests are ordered, decided, and answered once they are committed."""
