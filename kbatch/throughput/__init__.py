"""Which micro-batch trains fastest."""
