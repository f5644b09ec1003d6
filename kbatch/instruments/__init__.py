"""What touches the machine: its environment, its use, its failures."""
