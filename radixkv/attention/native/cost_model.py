"""When reading a shared prefix once pays on a CPU with compiled code."""

# A shared prefix saves reading (sequences - 1) x tokens; merging its result costs as much as reading a few dozen tokens.
MIN_SAVED_TOKENS = 64
