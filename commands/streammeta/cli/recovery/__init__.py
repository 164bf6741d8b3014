"""Commands that back up, restore and recover a cluster."""
