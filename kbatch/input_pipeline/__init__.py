"""Find out whether the input pipeline or the train step limits training."""
