"""Shared by all results: their base class, and their page in HTML, Markdown, notebooks, print."""
