"""Pages: HTML, Markdown and notebooks."""
