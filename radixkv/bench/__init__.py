"""What `radixkv bench` measures, always against a baseline in the same run."""
