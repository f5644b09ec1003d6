"""Whether the data are the bottleneck."""
