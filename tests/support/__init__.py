"""Helpers of the tests: tiny models, recorders, oracles, and runs in separate processes."""
