"""Tests of `gyre/trajectory`."""
