"""Figures, tables and reports of a study, drawn from files without TensorFlow."""
