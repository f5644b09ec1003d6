"""The data of a training, in whatever form `fit` takes them: a sample of rows, and batches."""

import dataclasses
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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
from kbatch.training.data.batches import ArrayRows, Cuts, in_blocks, most_examples, of_known_size
from kbatch.training.data.forms import (
    FORMS,
    arrays_of,
    as_dataset,
    batches_of,
    called_for,
    check_class_weight,
    each_part,
    fresh_copy,
    gives_batches,
    is_batched,
    is_dataset,
    open_spec,
    parts_of,
    rows_of,
    spec_of,
)
from kbatch.training.model import build_ahead, user_step
from kbatch.training.state import check_seed, seed_of

_MOST_ROWS = 64
_ELEMENTS_LOOKED_AT = 16
# Labels are classes if each value has at least this many rows on average.
# A split is noted if training lacks the classes of more than this share of the validation rows, or
# if validation lacks classes that a random split lacks with a chance of less than exp(-7).
_ROWS_OF_A_CLASS, _MANY_UNSEEN, _SURE_LOG_CHANCE = 5, 0.1, -7.0


class Sample(NamedTuple):
    """Some rows of the data, and how many there are in all."""

    rows: Any  # Inputs, targets and perhaps weights: nested NumPy arrays of shape (rows, ...).
    # None where it is not known; of a long dataset of batches at most so many.
    examples: int | None
    note: Note | None = None  # What a reader must know of the choice.


class Batches(NamedTuple):
    """Training data in batches of one size, and what they are validated on."""

    dataset: tf.data.Dataset
    validation_data: Any  # A dataset in validation batches; for several replicas it may be arrays.
    validation_batch_size: int
    validation_batches: int | None  # At most, None where that is not known.
    examples: int | None  # At most in an epoch, None where that is not known.
    # Tells the order of arrays from others, None where it is drawn without a seed; of a dataset
    # only its batches show it.
    order: str | None
    of_dataset: bool
    epoch_steps: int | None  # Of a dataset that goes on with the next epoch.


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
    """Make a dataset of batches of one size with the pipeline of a search.

    Each epoch reads the rows of arrays in another order. The arrays stay in memory once; of
    batches, only the next few are made ahead.

    Example:

    ```python
    model.fit(kbatch.training_dataset(x, y, 64), epochs=5)
    model.fit(kbatch.training_dataset(dataset, batch_size=64), epochs=5)
    ```

    Args:
        x: What `BatchSizeTuner.search` takes as `x`: an array (NumPy, pandas, tensor, or a CSR
            matrix of SciPy, which is made dense) or several in dicts, lists or tuples; or a
            `tf.data.Dataset` of batches of any size or of single examples, a Grain dataset of
            batches, a `keras.utils.PyDataset`, or a function `batch_size -> tf.data.Dataset`.
        y: Targets of arrays in the same forms, or `None`.
        batch_size: Integer. Rows of a batch; the last one of an epoch has what is left.
            Default: 32.
        sample_weight: Weights of the rows of arrays in the loss, or `None`.
        shuffle: Boolean. Whether each epoch reads the rows of arrays, or the batches of a
            `PyDataset`, in a new order. Default: True.
        seed: Integer or `None`. The first training run of each trial of a search with this seed
            reads its rows in the same orders. If `None`, the orders differ from call to call.
        model: The model to train, or `None`. Needed only if the shapes of a dataset do not show
            whether its elements are batches.

    Returns:
        A `tf.data.Dataset` of `x`, `(x, y)` or `(x, y, sample_weight)`. Beside it `fit` takes no
        `batch_size`; `shuffle=False` only stops Keras's warning that it shuffles no dataset.

    Raises:
        ValueError: If a search cannot train with the data, if parts have unequal lengths, or if
            there are fewer examples than `batch_size`.
    """
    if not is_integer(batch_size) or batch_size < 1:
        raise InputError(
            "`batch_size` must be an integer of at least 1. A decision has one if a training run "
            f"completed. Received: batch_size={batch_size!r}."
        )
    size = int(batch_size)
    data = TrainingData(x, y, sample_weight, shuffle=shuffle)
    # As in the first `fit` of an execution, from its first epoch.
    first = seed_of(check_seed(seed), 0, 0)
    return data.batches(size, model, seed=first, largest_batch_size=size).dataset


@dataclasses.dataclass(eq=False)
class TrainingData:
    """The data arguments of `fit`, and what was read of them: a dataset is sampled once.

    A copy that travels to another process has the sample alone, or the function that makes data.
    """

    x: Any = None
    y: Any = None
    sample_weight: Any = None
    class_weight: Any = None
    validation_data: Any = None
    validation_split: float = 0.0
    shuffle: bool = True
    # Known rows, until a model tells what they are: the spec of an element of a dataset (None of
    # arrays, whose rows are examples), a sample of batches (None if a part of the elements has no
    # axis), and a sample of examples.
    sampled: dataclasses.InitVar[tuple[Any, Sample | None, Sample] | None] = None

    def __post_init__(self, sampled: Any):
        self.given = [vars(self)[field.name] for field in dataclasses.fields(self)]
        self.x, self.validation_data = map(dataset_of_grain, (self.x, self.validation_data))
        self._sample = sampled
        makes_batches = isinstance(self.x, (tf.data.Dataset, keras.utils.PyDataset))
        self.is_function = callable(self.x) and not makes_batches
        self._cuts: Cuts = {}  # Where validation data begin to repeat.
        # Of `x` and the validation data, if they are a `PyDataset`: those of the last training run.
        self._copies: dict[str, Any] = {}
        self.not_copied: str | None = None  # Why training runs share a `PyDataset`.
        self._rows: ArrayRows | None = None  # All, with the graphs that shuffle and gather them.

    def __reduce__(self):
        if self.is_function:
            return TrainingData, (self.x,)
        return TrainingData, (), {"_sample": self._sampled()}

    @classmethod
    def of_example(cls, example: Any) -> "TrainingData":
        """Take one example, x or (x, y) without a batch axis, for a sample of unknown data."""
        # As in Keras, a tuple is (x, y).
        parts = example if isinstance(example, tuple) else (example,)
        rows, _ = arrays_of(*each_part(lambda leaf: np.asarray(leaf)[None], parts))
        return cls(sampled=(None, None, Sample(each_part(np.asarray, rows), None)))

    def arguments(self) -> tuple[str, ...]:
        """Return the form of `x`, and the names of the other data arguments that were given."""
        known = "PyDataset" if isinstance(self.x, keras.utils.PyDataset) else "arrays"
        form = "dataset" if is_dataset(self.x) else "function" if self.is_function else known
        names = ("y", "sample_weight", "class_weight")
        return (form, *(name for name in names if getattr(self, name) is not None))

    def is_same(self, other: "TrainingData") -> bool:
        return all(map(operator.is_, self.given, other.given))

    def check(self) -> None:
        """Refuse data of which no rows can be taken; a dataset is read."""
        if self.is_function:
            self._check_given()
        else:
            self._sampled()

    def some_rows(self, model: Any) -> Sample | None:
        """Return rows of the data; None of a function, which makes datasets of any batch size.

        Of a dataset they are those of its largest element: the longest sequence needs most memory.
        """
        if self.is_function:
            return None
        spec, batches, examples = self._sampled()
        batched = spec is not None and is_batched(spec, model)
        return (batches if batched else None) or examples

    def build(self, model: keras.Model, batch_size: int = 1) -> None:
        """Build a model, its metrics and its optimizer from the shapes of the data.

        A data function is called with `batch_size`.
        """
        known = self.some_rows(model)
        if known is not None:
            check_labels(model, keras.utils.unpack_x_y_sample_weight(known.rows)[1])
            spec = each_part(open_spec, known.rows)
        elif model.built:
            return
        else:
            spec = called_for(self.x, model, batch_size).element_spec
        if model.built or user_step(model) is not None:
            build_ahead(model, spec)
        else:
            build_symbolically(model, spec)

    def repeated(self, rows: int, model: keras.Model) -> tf.data.Dataset:
        """Return endless batches of so many rows of the sample, or those of a data function."""
        known = self.some_rows(model)
        if known is None:
            return called_for(self.x, model, rows)
        # tf.data would pack a list into one tensor.
        parts = keras.tree.lists_to_tuples(known.rows)
        count = keras.tree.flatten(parts)[0].shape[0]
        # A length that is not known until it runs: one graph serves all sizes.
        sizes = tf.data.Dataset.from_tensors(tf.constant(rows)).repeat()
        return sizes.map(
            lambda size: each_part(lambda leaf: tf.gather(leaf, tf.range(size) % count), parts)
        )

    def sample(self, rows: int, model: keras.Model, *, fewest: int | None = None) -> Any:
        """Return a batch of so many rows, on the device.

        Raises:
            DataEnded: If a data function gives fewer than that, or than `fewest`.
        """
        batch = next(iter(self.repeated(rows, model)), None)
        found = 0 if batch is None else rows_of(batch)
        if found < (fewest or rows):
            raise DataEnded(found)
        return held_on_device(batch)

    def largest_rows(self, above: float, model: Any) -> Any:
        """Return a batch with the rows that have the largest inputs, and others.

        If no input is a float above `above`, return None. Of a dataset, only the sample is read.
        """
        x, y, weight, _ = self._split()
        if gives_batches(x):
            found = self.sample(_MOST_ROWS, model, fewest=1)
        else:
            found, _ = arrays_of(x, y, weight, self.class_weight)
        leaves = parts_of(keras.utils.unpack_x_y_sample_weight(found)[0])
        floats = [np.asarray(one) for one in leaves if "float" in str(one.dtype)]
        floats = [one for one in floats if max(one.max(), -one.min()) > above]
        if not floats:
            return None
        sizes = sum(np.abs(one).reshape(len(one), -1).max(1) for one in floats)
        half, count = _MOST_ROWS // 2, len(floats[0])
        rows = [np.argsort(sizes)[-half:], np.linspace(0, count - 1, half).astype(int)]
        chosen = np.unique(np.concatenate(rows))
        return each_part(lambda one: tf.convert_to_tensor(np.asarray(one)[chosen]), found)

    def batches(
        self,
        batch_size: int,
        model: Any = None,  # Arrays need none.
        *,
        seed: int | None,
        largest_batch_size: int = 1,  # The data must fill it once.
        validation_batch_size: int = 1,
        validation_steps: int | None = None,
        endless: bool = False,  # Arrays go on from epoch to epoch: to begin an iterator takes time.
        first_epoch: int = 0,  # Arrays begin with the order of this epoch.
        fresh: bool | None = None,  # Whether a `PyDataset` is a new copy or the last one.
        whole: bool = False,  # The model may take full batches only, with a known size.
    ) -> Batches:
        """Return all rows in batches of one size, each epoch of arrays in an order of its own."""
        x, y, weight, validation_data = self._split()
        if fresh is not None:
            x, validation_data = (
                self._copied(name, one, fresh)
                for name, one in (("x", x), ("validation_data", validation_data))
            )
        order = epoch_steps = None
        if of_dataset := gives_batches(x):
            order_of = {"shuffle": self.shuffle, "seed": seed}
            dataset = batches_of(x, model, batch_size, whole=whole, **order_of)
            examples = None
            if is_dataset(x):  # What was read of it knows more than its first batch.
                known = self._sample and self.some_rows(model)
                examples = known.examples if known else most_examples(x, model)
            if self.class_weight is not None:
                check_class_weight(keras.utils.unpack_x_y_sample_weight(dataset.element_spec)[1])
                dataset = dataset.map(make_class_weight_map_fn(self.class_weight))
            dataset = dataset.prefetch(tf.data.AUTOTUNE)
        else:
            if self._rows is None:
                arrays, _ = arrays_of(x, y, weight, self.class_weight)
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
            self._copies[name], why = fresh_copy(data)
            self.not_copied = self.not_copied or why
        return self._copies[name]

    def count_examples(self, build: Callable[[], keras.Model], batch_size: int) -> int | None:
        """Count the training examples of an epoch, None where they are not known before it.

        A data function is called with `batch_size`; what a batch is depends on the model.
        """
        x, y, weight, _ = self._split()
        if not gives_batches(x):
            return arrays_of(x, y, weight, self.class_weight)[1]
        if isinstance(x, keras.utils.PyDataset):
            return x.num_batches and x.num_batches * keras.tree.flatten(x[0])[0].shape[0]
        model = build()
        return most_examples(x if is_dataset(x) else called_for(x, model, batch_size), model)

    def count_validated(self, build: Callable[[], keras.Model]) -> int:
        """Count the examples of a validation; 0 if there is none or the number is not known."""
        data = self._split()[-1]
        if data is None or callable(data):
            return 0
        if not gives_batches(data):
            return rows_of(data)
        if isinstance(data, keras.utils.PyDataset):
            return (data.num_batches or 0) * keras.tree.flatten(data[0])[0].shape[0]
        return (most_examples(data, build()) if is_dataset(data) else None) or 0

    def check_split(self) -> Note | None:
        """Say if `validation_split` parts labels that are sorted by class."""
        _, trained, _, validated = self._split()
        if validated is None or validated is self.validation_data:
            return None
        labels = [_classes(one) for one in (trained, validated[1])]
        if labels[0] is None or labels[1] is None:
            return None
        known, counts = np.unique(labels[0], return_counts=True)
        found, rows = np.unique(labels[1]), len(labels[1])
        if not rows or counts.mean() < _ROWS_OF_A_CLASS:
            return None
        unseen, there = float(np.mean(~np.isin(labels[1], known))), np.isin(known, found)
        # The chance that rows drawn at random lack the other classes, whichever these are.
        log_chance = math.log(math.comb(len(known), there.sum()))
        log_chance += rows * math.log(max(counts[there].sum(), 0.5) / counts.sum())
        if unseen > _MANY_UNSEEN:
            what = f"training lacks the classes of {percent(unseen)} of the validation examples"
        elif log_chance < _SURE_LOG_CHANCE:
            what = f"the validation examples are of {len(found)} of {len(known)} classes"
        else:
            return None
        return Note.of("split_by_class", what=what)

    def _check_given(self) -> None:
        if self.x is None:
            raise InputError(
                f"There is no training data: `x` is missing. {FORMS} Received: x=None."
            )
        if gives_batches(self.x) and not (self.y is None and self.sample_weight is None):
            raise InputError(
                "A dataset brings its own targets and sample weights, as (x, y) or "
                "(x, y, sample_weight): leave out `y` and `sample_weight`. "
                f"Received: y of type {type(self.y).__name__}, sample_weight of type "
                f"{type(self.sample_weight).__name__}."
            )

    def _split(self) -> tuple[Any, Any, Any, Any]:
        """Return inputs, targets and weights to train on, and what to validate on."""
        self._check_given()
        whole = self.x, self.y, self.sample_weight
        if not self.validation_split or self.validation_data is not None:
            return (*whole, self.validation_data)
        if gives_batches(self.x):
            raise InputError(
                "`validation_split` splits arrays only: give `validation_data` beside a dataset. "
                f"Received: validation_split={self.validation_split}."
            )
        share = self.validation_split
        try:
            # Keras would leave rows out, and say nothing.
            if not isinstance(share, numbers.Real) or not 0 < share < 1:
                raise ValueError(
                    "`validation_split` must be a share of the rows above 0 and below 1: leave it "
                    f"out to validate on none. Received: validation_split={share!r}."
                )
            split: Any = train_validation_split(whole, validation_split=share)
        except (ValueError, TypeError) as error:
            raise InputError(str(error)[:300]) from error
        return (*split[0], split[1])

    def _sampled(self) -> tuple[Any, Sample | None, Sample]:
        # To read a dataset again may fill a buffer of shuffling.
        if self._sample is None:
            self._check_given()
            data: Any = as_dataset(fresh_copy(self.x)[0])
            self._sample = _first_elements(data) if is_dataset(data) else self._first_rows()
        return self._sample

    def _first_rows(self) -> tuple[None, None, Sample]:
        first: Any = keras.tree.map_structure(
            lambda leaf: (
                leaf[:_MOST_ROWS]
                if hasattr(leaf, "__getitem__") and getattr(leaf, "shape", None) != ()
                else leaf
            ),
            {"x": self.x, "y": self.y, "weight": self.sample_weight},
        )
        rows, count = arrays_of(**first, class_weight=self.class_weight)
        if not count:
            raise InputError("The data are empty: give arrays with rows. Received: 0 examples.")
        return None, None, Sample(each_part(np.asarray, rows), rows_of(self.x))


def _classes(y: Any) -> np.ndarray | None:
    """Return the class of each row, one-hot or as an index. If it is no class, return None."""
    if not hasattr(y, "__array__"):
        return None
    y = np.asarray(y)
    if y.ndim == 2 and y.shape[1] > 1 and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        return y.argmax(1)
    if y.ndim > 2 or y.size != len(y) or y.dtype.kind not in "iufb" or (y != np.round(y)).any():
        return None
    return y.reshape(-1)


def check_labels(model: Any, y: Any) -> None:
    """Refuse one-hot labels where the loss takes an index of each, and the reverse."""
    outputs, loss = getattr(model, "outputs", None) or (), getattr(model, "loss", None)
    if user_step(model) is not None or len(outputs) != 1 or not isinstance(y, np.ndarray):
        return
    if 1 in (outputs[0].shape[-1], *y.shape):
        return
    lacks = {"sparse_categorical_crossentropy": 0, "categorical_crossentropy": 1}
    axes = lacks.get(str(getattr(loss, "name", loss)))  # That labels have fewer than outputs.
    if axes == len(outputs[0].shape) - y.ndim:
        give = "keras.utils.to_categorical(y)" if axes else "y.argmax(axis=-1)"
        raise InputError(f"The loss takes other labels: give `{give}`. Received: loss={loss!r}.")


def _first_elements(dataset: tf.data.Dataset) -> tuple[Any, Sample | None, Sample]:
    """Read elements one after the other, as batches where they may be, and as examples."""
    spec = spec_of(dataset)
    for part in tf.nest.flatten(spec):
        if isinstance(part, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
            kind = part.value_type.__name__
            raise InputError(
                f"No rows can be taken out of a {kind}: convert the data with `.to_tensor()` or "
                "`tf.sparse.to_dense`. A search trains them in whole batches with "
                f"`micro_batch_size=None`. Received: a dataset with a {kind}."
            )
    may_be_batches = all(part.shape.rank != 0 for part in keras.tree.flatten(spec))
    cardinality = int(dataset.cardinality())
    batches, examples = _Reading(cardinality), _Reading(cardinality)
    for element in dataset.take(_ELEMENTS_LOOKED_AT):
        arrays = each_part(np.asarray, element)
        # The rank of what `tf.py_function` returns is known only now.
        may_be_batches = may_be_batches and all(part.ndim for part in keras.tree.flatten(arrays))
        examples.add(each_part(lambda leaf: leaf[None], arrays))
        if may_be_batches:
            batches.add(arrays)
    if not examples.counts:
        raise InputError("The dataset is empty: give one that has elements. Received: no element.")
    return spec, batches.sample() if may_be_batches else None, examples.sample()


class _Reading:
    """Elements read as batches, or as examples of one row: the rows of the largest one."""

    def __init__(self, cardinality: int):
        self.counts: list[int] = []  # Rows of each element.
        self._cardinality = cardinality
        self._row_bytes: list[float] = []
        self._rows: Any = None

    def add(self, element: Any) -> None:
        leaves = parts_of(element)
        count = leaves[0].shape[0]
        size = sum(leaf.nbytes for leaf in leaves) / max(1, count)
        if size > max(self._row_bytes, default=-1.0):  # A view would keep the whole element.
            self._rows = each_part(lambda leaf: np.array(leaf[:_MOST_ROWS]), element)
        self._row_bytes.append(size)
        self.counts.append(count)

    def sample(self) -> Sample:
        """Return the rows, with at most how many there are in the dataset."""
        examples = None
        if self._cardinality >= 0:
            seen_all = self._cardinality <= len(self.counts)
            examples = sum(self.counts) if seen_all else self._cardinality * max(self.counts)
        differ = len(set(self._row_bytes)) > 1
        note = Note.of("rows_differ", elements=len(self.counts)) if differ else None
        return Sample(self._rows, examples, note)


def held_on_device(batch: Any) -> Any:
    """Copy a batch to the first GPU, where there is one; texts stay where they are."""
    gpus = tf.config.list_logical_devices("GPU")
    if not gpus:
        return batch
    with tf.device(gpus[0].name):
        return each_part(lambda leaf: leaf if leaf.dtype == tf.string else tf.identity(leaf), batch)


_SIGNATURE = inspect.signature(keras.Model.fit)
_DATA = tuple(field.name for field in dataclasses.fields(TrainingData))


class FitCall:
    """The arguments of one call of `fit`."""

    def __init__(
        self,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any],
        *,
        named: Mapping[str, Any] | None = None,
    ):
        """Bind arguments to the signature of `keras.Model.fit`, unless `named` has their names.

        Raises:
            TypeError: If that does not take them.
        """
        if named is None:
            bound = _SIGNATURE.bind(None, *arguments, **keywords)
            bound.apply_defaults()
            named = {name: bound.arguments[name] for name in bound.arguments if name != "self"}
        self.arguments, self.keywords = arguments, keywords
        self.named = named  # All, with the defaults of Keras.
        self.data = TrainingData(**{name: named[name] for name in _DATA if name in named})
        self.callbacks: list[Any] = keras.tree.flatten(named.get("callbacks") or [])
        #: Epochs of a complete training run; a custom `fit` may take no such argument.
        self.epochs: int = named.get("epochs", 1) - named.get("initial_epoch", 0)

    @classmethod
    def of_search(
        cls, arguments: Sequence[Any], keywords: Mapping[str, Any], *, stock_fit: bool = False
    ) -> "FitCall":
        """Bind the arguments of a search, whose `HyperModel.fit` may take others than Keras's."""
        try:
            return cls(arguments, keywords)
        except TypeError as error:
            if stock_fit:
                raise InputTypeError(
                    f"`search` takes what `keras.Model.fit` takes. Received: a call that {error}."
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
        """Return what was given beside the data and these."""
        left_out = (*_DATA, *names)
        return {name: value for name, value in self.named.items() if name not in left_out}
