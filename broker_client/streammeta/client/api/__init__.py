"""The facade of the broker's client, and its tasks in the background."""
