"""Figures, one module each: the info is computed, then drawn."""
