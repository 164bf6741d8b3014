"""Protocol of object stores and the rules that every store follows."""
