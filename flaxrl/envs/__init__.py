"""Environments: the episode rule (`base`), their specs, and one adapter a suite."""
