"""Inspection of a cache: snapshots as data and JSON, drawn in the terminal and as SVG."""
