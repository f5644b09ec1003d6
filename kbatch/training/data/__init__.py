"""The forms of training data, and batches of them."""
