"""The figures of an inference profile."""
