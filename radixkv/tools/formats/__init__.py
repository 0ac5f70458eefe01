"""The forms in which families of models write calls of tools, one per file."""
