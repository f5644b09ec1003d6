"""Running a search over batch sizes."""
