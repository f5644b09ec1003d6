"""Shared by all figures: canvas, colours, axes and labels."""
