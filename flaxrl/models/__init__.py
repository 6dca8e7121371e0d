"""Torsos, cores, heads, policies and the agent that joins them: plain Flax Linen modules."""
