"""Read training data in any form, and cut it into batches."""
