"""What several benches share."""
