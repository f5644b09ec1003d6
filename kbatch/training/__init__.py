"""Train Keras models: train steps, gradient accumulation, clocks, and saved state."""
