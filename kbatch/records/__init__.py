"""What every record shares: files, environment, usage and training runs."""
