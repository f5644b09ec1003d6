"""What all results share: their base, and their page in HTML, Markdown, notebooks and print."""
