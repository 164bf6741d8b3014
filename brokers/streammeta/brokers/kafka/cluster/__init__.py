"""A broker's part in the cluster: its view, its keys, its topics."""
