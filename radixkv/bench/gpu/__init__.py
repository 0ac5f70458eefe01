"""What a GPU needs for attention and whole steps, against what it could do at most; and a GPU's first light."""
