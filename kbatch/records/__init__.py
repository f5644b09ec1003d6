"""Frozen records of what was measured, and their files."""
