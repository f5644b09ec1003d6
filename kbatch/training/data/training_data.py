"""Sample the data arguments of `fit`, in any form, and make batches of one size of them."""

import dataclasses
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from kbatch.analysis.batch_sizes import is_integer
from kbatch.errors import DataEnded, InputError, InputTypeError
from kbatch.library_internals import (
    build_symbolically,
    dataset_of_grain,
    make_class_weight_map_fn,
    train_validation_split,
)
from kbatch.page.numbers import percent
from kbatch.records.notes import Note
from kbatch.training.data import forms
from kbatch.training.data.batches import (
    SAMPLE_ROWS,
    ArrayRows,
    Batches,
    Cuts,
    Sample,
    in_blocks,
    most_examples,
    of_known_size,
    sample_elements,
)
from kbatch.training.model import build_ahead, user_step
from kbatch.training.state import check_seed, seed_of

_LEAST_ROWS_PER_CLASS = 5  # On average. With fewer, labels are not taken for classes.
# `check_split` warns if training lacks the classes of more than this share of validation rows, or
# if a random split would miss as many classes in validation with a chance of less than exp(-7).
_UNSEEN_SHARE, _LOG_CHANCE = 0.1, -7.0


def training_dataset(
    x: Any,
    y: Any = None,
    batch_size: int | None = 32,
    *,
    sample_weight: Any = None,
    shuffle: bool = True,
    seed: int | None = None,
    model: keras.Model | None = None,
) -> tf.data.Dataset:
    """Make a dataset of batches of one size, with the input pipeline of a search.

    Each epoch reads the rows of arrays in a new order. The arrays are in memory once, and only the
    next few batches are made ahead.

    Example:

    ```python
    model.fit(kbatch.training_dataset(x, y, 64), epochs=5)
    model.fit(kbatch.training_dataset(dataset, batch_size=64), epochs=5)
    ```

    Args:
        x: The data, in a form that `BatchSizeTuner.search` takes: an array (NumPy, pandas, tensor,
            or a CSR matrix of SciPy, which is made dense) or several in dicts, lists or tuples; a
            `tf.data.Dataset` of batches of any size or of single examples; a Grain dataset of
            batches; a `keras.utils.PyDataset`; or a function `batch_size -> tf.data.Dataset`.
        y: Targets, if `x` is arrays, in the same forms. Default: None.
        batch_size: Integer. Rows of a batch. The last batch of an epoch may be smaller.
            Default: 32.
        sample_weight: Weights of the rows in the loss, if `x` is arrays. Default: None.
        shuffle: Boolean. Whether each epoch reads the rows of arrays, or the batches of a
            `PyDataset`, in a new order. Default: True.
        seed: Integer. Seed of the orders. They are the same as in the first training run of each
            trial of a search with this seed. If None, they differ between calls. Default: None.
        model: The model to train. It is needed only if the shapes of a dataset do not show
            whether its elements are batches. Default: None.

    Returns:
        A `tf.data.Dataset` of `x`, `(x, y)` or `(x, y, sample_weight)`. Do not give `fit` a
        `batch_size` with it. `shuffle=False` in `fit` turns off Keras's warning about datasets.

    Raises:
        ValueError: If a search cannot train with the data, if its parts have unequal lengths, or if
            there are fewer examples than `batch_size`.
    """
    if batch_size is None or not is_integer(batch_size) or batch_size < 1:
        raise InputError(
            "`batch_size` must be an integer of at least 1. `decision.batch_size` is None if the "
            f"search completed no training run. Received: batch_size={batch_size!r}."
        )
    size = int(batch_size)
    data = TrainingData(x, y, sample_weight, shuffle=shuffle)
    # A search derives the seed of the first `fit` of a trial in the same way.
    fit_seed = seed_of(check_seed(seed), 0, 0)
    return data.batches(size, model, seed=fit_seed, largest_batch_size=size).dataset


@dataclasses.dataclass(eq=False)
class TrainingData:
    """The data arguments of `fit`, and a sample of their rows, which is read once.

    A copy that is sent to another process holds only the sample, or the function that makes data.
    """

    x: Any = None
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    validation_data: Any = None
    validation_split: float = 0.0
    shuffle: bool = True
    # The result of `sample_elements`. For arrays, the first two values are None. A dataset has two
    # samples, because only a model shows whether its elements are batches.
    sampled: dataclasses.InitVar[tuple[Any, Sample | None, Sample] | None] = None

    def __post_init__(self, sampled: Any):
        self.as_given = [vars(self)[name] for name in _DATA]
        self.x, self.validation_data = map(dataset_of_grain, (self.x, self.validation_data))
        self._sample = sampled
        makes_batches = isinstance(self.x, (tf.data.Dataset, keras.utils.PyDataset))
        self.is_function = callable(self.x) and not makes_batches
        self._cuts: Cuts = {}
        # Copies for the last training run, if `x` or the validation data are a `PyDataset`.
        self._copies: dict[str, Any] = {}
        self.not_copied: str | None = None  # Why training runs share a `PyDataset`.
        self._rows: ArrayRows | None = None  # All rows, with the graphs that shuffle them.

    def __reduce__(self):
        if self.is_function:
            return TrainingData, (self.x,)
        return TrainingData, (), {"_sample": self._sampled()}

    @classmethod
    def of_example(cls, example: Any) -> "TrainingData":
        """Make data of which only one example is known: x or (x, y), without a batch axis."""
        parts = example if isinstance(example, tuple) else (example,)
        rows, _ = forms.arrays_of(*forms.each_part(lambda leaf: np.asarray(leaf)[None], parts))
        return cls(sampled=(None, None, Sample(forms.each_part(np.asarray, rows), None)))

    def arguments(self) -> tuple[str, ...]:
        """Return the form of `x`, and the names of the other data arguments that were given."""
        form = "PyDataset" if isinstance(self.x, keras.utils.PyDataset) else "arrays"
        form = "dataset" if forms.is_dataset(self.x) else "function" if self.is_function else form
        names = ("y", "sample_weight", "class_weight")
        return (form, *(name for name in names if getattr(self, name) is not None))

    def is_same(self, other: "TrainingData") -> bool:
        return all(map(operator.is_, self.as_given, other.as_given))

    def check(self) -> None:
        """Raise InputError if no rows can be taken from the data. A dataset is read for this."""
        if self.is_function:
            self._check_arguments()
        else:
            self._sampled()

    def some_rows(self, model: Any) -> Sample | None:
        """Return some rows of the data, or None if the data are a function of the batch size.

        For a dataset, return rows of its largest element, because long sequences need most memory.
        """
        if self.is_function:
            return None
        spec, batches, examples = self._sampled()
        batched = spec is not None and forms.is_batched(spec, model)
        return (batches if batched else None) or examples

    def build(self, model: keras.Model, batch_size: int = 1) -> None:
        """Build a model, its metrics and its optimizer from the shapes of the data.

        A data function is called with `batch_size`.
        """
        known = self.some_rows(model)
        if known is not None:
            check_labels(model, keras.utils.unpack_x_y_sample_weight(known.rows)[1])
            spec = forms.each_part(forms.open_spec, known.rows)
        elif model.built:
            return
        else:
            spec = forms.spec_of(forms.called_for(self.x, model, batch_size), batched=True)
        if model.built or user_step(model) is not None:
            build_ahead(model, spec)
        else:
            build_symbolically(model, spec)

    def repeated(self, rows: int, model: keras.Model) -> tf.data.Dataset:
        """Return endless batches of `rows` rows from the sample, or batches of a data function."""
        known = self.some_rows(model)
        if known is None:
            return forms.called_for(self.x, model, rows)
        # tf.data would pack a list into one tensor.
        parts = keras.tree.lists_to_tuples(known.rows)
        count = keras.tree.flatten(parts)[0].shape[0]
        # The size is a tensor, so that one graph serves all sizes.
        sizes = tf.data.Dataset.from_tensors(tf.constant(rows)).repeat()
        return sizes.map(
            lambda size: forms.each_part(
                lambda leaf: tf.gather(leaf, tf.range(size) % count), parts
            )
        )

    def sample(self, rows: int, model: keras.Model, *, fewest: int | None = None) -> Any:
        """Return a batch of `rows` rows, on the GPU if there is one.

        Raises:
            DataEnded: If a data function gives fewer than `fewest` rows, by default `rows`.
        """
        batch = next(iter(self.repeated(rows, model)), None)
        count = 0 if batch is None else forms.rows_of(batch)
        if count < (fewest or rows):
            raise DataEnded(count)
        return forms.held_on_device(batch)

    def largest_rows(self, above: float, model: Any) -> Any:
        """Return a batch of the rows with the largest inputs, and of some evenly spaced rows.

        If no float input is larger than `above`, return None. Of a dataset, only a sample is read.
        """
        x, y, weight, _ = self._split()
        if forms.gives_batches(x):
            data = self.sample(SAMPLE_ROWS, model, fewest=1)
        else:
            data, _ = forms.arrays_of(x, y, weight, self.class_weight)
        inputs = forms.parts_of(keras.utils.unpack_x_y_sample_weight(data)[0])
        floats = [np.asarray(array) for array in inputs if "float" in str(array.dtype)]
        floats = [array for array in floats if max(array.max(), -array.min()) > above]
        if not floats:
            return None
        sizes = sum(np.abs(array).reshape(len(array), -1).max(1) for array in floats)
        half, count = SAMPLE_ROWS // 2, len(floats[0])
        spaced = np.linspace(0, count - 1, half).astype(int)
        rows = np.unique([*np.argsort(sizes)[-half:], *spaced])
        return forms.each_part(lambda leaf: tf.convert_to_tensor(np.asarray(leaf)[rows]), data)

    def batches(
        self,
        batch_size: int,
        model: Any = None,  # Arrays do not need it.
        *,
        seed: int | None,
        largest_batch_size: int = 1,  # The data must have at least this many examples.
        validation_batch_size: int = 1,
        validation_steps: int | None = None,
        endless: bool = False,  # Whether one iterator of arrays has all epochs, which saves time.
        first_epoch: int = 0,  # The epoch with whose order arrays begin.
        fresh: bool | None = None,  # True: copy a `PyDataset`. False: use the last copy again.
        whole: bool = False,  # Whether the model may accept only full batches of a known size.
    ) -> Batches:
        """Return all rows in batches of one size. Arrays are shuffled again for each epoch."""
        x, y, weight, validation_data = self._split()
        if fresh is not None:
            x = self._copied("x", x, fresh)
            validation_data = self._copied("validation_data", validation_data, fresh)
        order = epoch_steps = None
        if of_dataset := forms.gives_batches(x):
            order_of = {"shuffle": self.shuffle, "seed": seed}
            dataset = forms.batches_of(x, model, batch_size, whole=whole, **order_of)
            examples = None
            if forms.is_dataset(x):  # Prefer the sample, for which several batches were counted.
                known = self._sample and self.some_rows(model)
                examples = known.examples if known else most_examples(x, model)
            if self.class_weight is not None:
                targets = keras.utils.unpack_x_y_sample_weight(dataset.element_spec)[1]
                forms.check_class_weight(targets)
                dataset = dataset.map(make_class_weight_map_fn(self.class_weight))
            dataset = dataset.prefetch(tf.data.AUTOTUNE)
        else:
            if self._rows is None:
                arrays, _ = forms.arrays_of(x, y, weight, self.class_weight)
                self._rows = ArrayRows(arrays, shuffle=self.shuffle)
            examples = self._rows.examples
            if endless:
                dataset = self._rows.endless(batch_size, seed=seed, first_epoch=first_epoch)
                epoch_steps = -(-examples // batch_size)
            else:
                dataset = self._rows.epoch(batch_size, seed=seed, first_epoch=first_epoch)
            if whole and examples % batch_size == 0:
                dataset = of_known_size(dataset, batch_size)
            if seed is not None or not self.shuffle:
                order = f"of seed {seed}" if self.shuffle else "as given"
        if examples is not None and examples < largest_batch_size:
            raise InputError(
                "A batch cannot be larger than the training set: leave out the batch sizes above "
                f"{examples}. Received: batch_size={largest_batch_size} for {examples} examples."
            )
        validation = in_blocks(
            validation_data,
            model,
            batch_size=validation_batch_size,
            steps=validation_steps,
            cuts=self._cuts,
            train_batch_size=batch_size,
            whole=whole,
        )
        return Batches(dataset, *validation, examples, order, of_dataset, epoch_steps)

    def _copied(self, name: str, data: Any, fresh: bool) -> Any:
        if fresh or name not in self._copies:
            self._copies[name], why = forms.fresh_copy(data)
            self.not_copied = self.not_copied or why
        return self._copies[name]

    def count_examples(self, build: Callable[[], keras.Model], batch_size: int) -> int | None:
        """Count the training examples of an epoch, or return None if their number is unknown.

        A data function is called with `batch_size`. The model shows whether a dataset is batched.
        """
        x, y, weight, _ = self._split()
        if not forms.gives_batches(x):
            return forms.arrays_of(x, y, weight, self.class_weight)[1]
        if isinstance(x, keras.utils.PyDataset):
            return x.num_batches and x.num_batches * keras.tree.flatten(x[0])[0].shape[0]
        model = build()
        dataset = x if forms.is_dataset(x) else forms.called_for(x, model, batch_size)
        return most_examples(dataset, model)

    def count_validated(self, build: Callable[[], keras.Model]) -> int:
        """Count the validation examples. If there are none or the number is unknown, return 0."""
        data = self._split()[-1]
        if data is None or callable(data):
            return 0
        if not forms.gives_batches(data):
            return forms.rows_of(data)
        if isinstance(data, keras.utils.PyDataset):
            return (data.num_batches or 0) * keras.tree.flatten(data[0])[0].shape[0]
        return (most_examples(data, build()) if forms.is_dataset(data) else None) or 0

    def check_split(self) -> Note | None:
        """Return a note if `validation_split` splits labels that are sorted by class."""
        _, y_train, _, validation_data = self._split()
        if validation_data is None or validation_data is self.validation_data:
            return None
        trained, validated = _classes(y_train), _classes(validation_data[1])
        if trained is None or validated is None:
            return None
        classes, counts = np.unique(trained, return_counts=True)
        if not len(validated) or counts.mean() < _LEAST_ROWS_PER_CLASS:
            return None
        unseen = float(np.mean(~np.isin(validated, classes)))
        in_validation = np.isin(classes, validated)
        # The approximate chance that all validation rows of a random split are of so few classes.
        log_chance = math.log(math.comb(len(classes), in_validation.sum()))
        share = max(counts[in_validation].sum(), 0.5) / counts.sum()
        log_chance += len(validated) * math.log(share)
        if unseen > _UNSEEN_SHARE:
            what = f"{percent(unseen)} of validation examples have a class that training lacks"
        elif log_chance < _LOG_CHANCE:
            count = len(np.unique(validated))
            what = f"validation examples have only {count} of {len(classes)} classes"
        else:
            return None
        return Note.of("split_by_class", what=what)

    def _check_arguments(self) -> None:
        if self.x is None:
            raise InputError(f"Training data `x` are required. {forms.FORMS} Received: x=None.")
        if forms.gives_batches(self.x) and not (self.y is None and self.sample_weight is None):
            raise InputError(
                "A dataset contains its targets and sample weights, as (x, y) or "
                "(x, y, sample_weight): leave out `y` and `sample_weight`. "
                f"Received: y of type {type(self.y).__name__}, sample_weight of type "
                f"{type(self.sample_weight).__name__}."
            )

    def _split(self) -> tuple[Any, Any, Any, Any]:
        """Return training inputs, targets and weights, and the validation data."""
        self._check_arguments()
        arrays = self.x, self.y, self.sample_weight
        if not self.validation_split or self.validation_data is not None:
            return (*arrays, self.validation_data)
        share = self.validation_split
        if forms.gives_batches(self.x):
            raise InputError(
                "`validation_split` works with arrays only: give `validation_data` instead. "
                f"Received: validation_split={share}."
            )
        # With other values, Keras would silently leave rows out.
        if not isinstance(share, numbers.Real) or not 0 < share < 1:
            raise InputError(
                "`validation_split` must be a share of the rows, more than 0 and less than 1: "
                "leave it out to train without validation. "
                f"Received: validation_split={share!r}."
            )
        try:
            split: Any = train_validation_split(arrays, validation_split=share)
        except (ValueError, TypeError) as error:
            raise InputError(str(error)[:300]) from error
        return (*split[0], split[1])

    def _sampled(self) -> tuple[Any, Sample | None, Sample]:
        """Sample the data once, because another reading may fill a shuffle buffer again."""
        if self._sample is not None:
            return self._sample
        self._check_arguments()
        data: Any = forms.as_dataset(forms.fresh_copy(self.x)[0])
        if forms.is_dataset(data):
            self._sample = sample_elements(data)
            return self._sample
        first: Any = keras.tree.map_structure(
            lambda leaf: (
                leaf[:SAMPLE_ROWS]
                if hasattr(leaf, "__getitem__") and getattr(leaf, "shape", None) != ()
                else leaf
            ),
            {"x": self.x, "y": self.y, "weight": self.sample_weight},
        )
        rows, count = forms.arrays_of(**first, class_weight=self.class_weight)
        if not count:
            raise InputError("The data are empty: give arrays with rows. Received: 0 examples.")
        sample = Sample(forms.each_part(np.asarray, rows), forms.rows_of(self.x))
        self._sample = (None, None, sample)
        return self._sample


def _classes(y: Any) -> np.ndarray | None:
    """Return the class of each row, or None if the targets are not classes."""
    if not hasattr(y, "__array__"):
        return None
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        return y.argmax(1)
    if y.ndim > 2 or y.size != len(y) or y.dtype.kind not in "iufb" or (y != np.round(y)).any():
        return None
    return y.reshape(-1)


def check_labels(model: Any, y: Any) -> None:
    """Raise InputError if labels are one-hot and the loss takes class indices, or the reverse."""
    outputs, loss = getattr(model, "outputs", None) or (), getattr(model, "loss", None)
    if user_step(model) is not None or len(outputs) != 1 or not isinstance(y, np.ndarray):
        return
    if 1 in (outputs[0].shape[-1], *y.shape):
        return
    # Labels of the wrong kind have this many fewer axes than the outputs.
    wrong = {"sparse_categorical_crossentropy": 0, "categorical_crossentropy": 1}
    axes = wrong.get(str(getattr(loss, "name", loss)))
    if axes == len(outputs[0].shape) - y.ndim:
        give = "one-hot labels: give `keras.utils.to_categorical(y)`"
        if not axes:
            give = "integer labels: give `y.argmax(axis=-1)`"
        raise InputError(f"This loss needs {give}. Received: loss={loss!r}.")


_SIGNATURE = inspect.signature(keras.Model.fit)
_DATA = tuple(field.name for field in dataclasses.fields(TrainingData))


class FitCall:
    """The arguments of one call of `fit`, bound to their names."""

    def __init__(
        self,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        *,
        named: Mapping[str, Any] | None = None,
    ):
        """Bind arguments to the signature of `keras.Model.fit`, unless `named` has their names.

        Raises:
            TypeError: If that signature does not accept the arguments.
        """
        if named is None:
            bound = _SIGNATURE.bind(None, *arguments, **keywords)
            bound.apply_defaults()
            named = {name: bound.arguments[name] for name in bound.arguments if name != "self"}
        self.arguments, self.keywords = arguments, keywords
        self.named = named  # All arguments, with Keras's defaults.
        self.data = TrainingData(**{name: named[name] for name in _DATA if name in named})
        self.callbacks: list[Any] = keras.tree.flatten(named.get("callbacks") or [])
        #: Epochs of a complete training run. A custom `fit` may have no such argument.
        self.epochs: int = named.get("epochs", 1) - named.get("initial_epoch", 0)

    @classmethod
    def of_search(
        cls, arguments: Sequence[Any], keywords: Mapping[str, Any], *, stock_fit: bool = False
    ) -> "FitCall":
        """Bind the arguments of a search. A custom `HyperModel.fit` may have other names."""
        try:
            return cls(arguments, keywords)
        except TypeError as error:
            if stock_fit:
                raise InputTypeError(
                    "`search` takes the arguments of `keras.Model.fit`. "
                    f"Received: a call that {error}."
                ) from error
            places = {f"argument {i + 1}": value for i, value in enumerate(arguments)}
            return cls(arguments, keywords, named=places | dict(keywords))

    def with_callbacks(self, callbacks: Sequence[Any]) -> "FitCall":
        """Return the same call with other callbacks."""
        place = list(_SIGNATURE.parameters).index("callbacks") - 1
        arguments, keywords = [*self.arguments], {**self.keywords}
        if arguments[place:] and arguments[place] is self.named.get("callbacks"):
            arguments[place] = callbacks
        else:
            keywords["callbacks"] = callbacks
        return FitCall(arguments, keywords, named={**self.named, "callbacks": callbacks})

    def without(self, *names: str) -> dict[str, Any]:
        """Return the arguments without the data and these names."""
        left_out = (*_DATA, *names)
        return {name: value for name, value in self.named.items() if name not in left_out}
