"""Experiments: what a model needs and how fast it is."""
