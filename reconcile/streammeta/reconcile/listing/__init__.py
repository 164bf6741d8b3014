"""Listings of a bucket: shards, inventories, and the owner of every key."""
