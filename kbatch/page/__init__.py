"""Shared by all results: their base class, and pages as text, HTML, Markdown and notebooks."""
