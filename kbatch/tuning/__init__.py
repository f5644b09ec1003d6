"""Batch size as a hyperparameter of keras-tuner."""
