"""Readers of task folders, one a format. Each has `recognises` and `load`, as `gyre.executions.tasks.Format` says."""
