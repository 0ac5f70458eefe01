"""What the cache's bookkeeping costs, how that grows, and whether it holds its rules under random work."""
