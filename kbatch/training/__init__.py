"""How a Keras model trains: steps, accumulation, clocks and state."""
