"""Controllers as a client finds, calls and watches them."""
