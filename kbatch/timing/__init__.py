"""Contenders timed in shuffled rounds."""
