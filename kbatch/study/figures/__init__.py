"""The figures of a study."""
