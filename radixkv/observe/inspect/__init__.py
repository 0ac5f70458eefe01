"""What is in the cache: as a tree in the terminal, as figures, as JSON, as a picture."""
