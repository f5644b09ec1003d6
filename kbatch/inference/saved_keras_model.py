"""A Keras model from a file."""

from pathlib import Path

import keras

from kbatch.errors import InputError


def load_saved_model(path: Path) -> keras.Model:
    """Loads a model that `model.save` wrote.

    Raises:
        InputError: If the file is none, or needs classes that are not known here.
    """
    try:
        model = keras.saving.load_model(path, compile=False)
    # Keras gives TypeError for a class it does not know, OSError and KeyError for a broken file.
    except (ValueError, TypeError, OSError, KeyError) as error:
        cause = " ".join(str(error).split())[:200]
        raise InputError(
            "The model file must be one that `model.save` wrote, .keras or .h5, of layers that "
            "Keras knows: for layers of your own call `kbatch.profile_inference` in Python. "
            f"Received: {path} ({cause})"
        ) from error
    if not isinstance(model, keras.Model):
        raise InputError(
            f"The file must hold a keras.Model. Received: {path} with a {type(model).__name__}."
        )
    return model
