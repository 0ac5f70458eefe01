"""How long a GPU takes for attention and whole steps, against what it could do at best; and a GPU's first light."""
