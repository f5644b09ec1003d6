"""How large a batch fits."""
