"""One server over HTTP: load, what HTTP costs, and hostile clients."""
