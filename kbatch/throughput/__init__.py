"""Find the micro-batch size that trains fastest."""
