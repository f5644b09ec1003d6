"""Shared by all records: files, notes, the machine, and training runs."""
