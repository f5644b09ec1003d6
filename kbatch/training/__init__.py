"""How a Keras model trains: the accumulating train step, its data and its clock."""
