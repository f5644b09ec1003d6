"""Which batch size to predict with."""
