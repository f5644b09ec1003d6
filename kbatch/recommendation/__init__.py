"""One recommendation from everything that limits a batch size."""
