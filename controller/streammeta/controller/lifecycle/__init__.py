"""The life of objects outside the map: expiry and deletion from the bucket."""
