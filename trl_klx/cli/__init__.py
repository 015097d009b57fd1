"""The `trl-klx` command."""
