"""The machine: memory, GPUs, worker processes and their failures."""
