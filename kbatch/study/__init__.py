"""Reading a search: its trials, what they decide, and its figures."""
