"""Whole answers of one engine in this process: speed, fairness between tenants, quality of narrower types."""
