"""What is known about each harness: how its calls tell their thread and role, and how it edits what we sampled.

One module a harness. Everything here was measured on the pinned versions; an edit that is not listed forks.
"""
