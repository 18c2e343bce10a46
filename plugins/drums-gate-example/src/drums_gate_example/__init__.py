"""A gate of one's own."""
