"""Simulation of several replicas behind a router: the real caches and the real router, service times from a cost model."""
