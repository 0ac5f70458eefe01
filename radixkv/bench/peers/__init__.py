"""The same work by engines of others, each in a process and an environment of its own."""
