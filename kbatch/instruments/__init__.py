"""What touches the machine: its environment, its failures."""
