"""Whether rows suit the inputs that a model declares."""

import keras

from kbatch.errors import InputError
from kbatch.inference.inference_inputs import InferenceInputs
from kbatch.training.data.model_inputs import alike, declared_inputs, ordered_rows


def check_inputs(model: keras.Model, inputs: InferenceInputs) -> None:
    """Checks that a model takes batches of any size, and rows as there are.

    Args:
        model: A model; one that does not declare its inputs is not looked at.
        inputs: Its inputs.

    Raises:
        InputError: If not.
    """
    tensors = declared_inputs(model)
    fixed = sorted({t.shape[0] for t in tensors if t.shape and t.shape[0] is not None})
    if fixed:
        raise InputError(
            "The model must take batches of any size: build it without a batch size "
            "(`keras.Input(shape)` and no `batch_shape` or `batch_size`). "
            f"Received: model={model.name!r} for batches of {fixed[0]} only."
        )
    if not tensors:
        return
    for leaf, tensor in zip(ordered_rows(model, inputs.rows), tensors, strict=True):
        if not alike(leaf.shape, tuple(tensor.shape)):
            raise InputError(
                "`x` must have the shapes of the model's inputs, with the examples on the first "
                "axis: give rows as the model takes them (`x[None]` for a single example). "
                f"Received: x with rows of shape {leaf.shape[1:]}, input {tensor.name!r} of shape "
                f"{tuple(tensor.shape[1:])}."
            )
