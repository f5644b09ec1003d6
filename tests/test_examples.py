"""The examples search on small stand-ins of their data, of the same shapes and types."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def images(count):
    """Bright and dark images in place of CIFAR-10's, with one digit each."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, count).astype("uint8")
    x = rng.uniform(0, 0.5, (count, 32, 32, 3)) + 0.5 * y[:, None, None, None]
    return x.astype("float32"), y


def reviews(count, length, vocabulary):
    """Token lists of different lengths, padded, in place of IMDB's reviews."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 2, count)
    x = rng.integers(1, vocabulary // 2, (count, length)) + y[:, None] * vocabulary // 2
    return np.where(np.arange(length) < rng.integers(5, length, (count, 1)), x, 0).astype(
        "int32"
    ), y


def check(module, study, tmp_path, capsys):
    assert {trial.status for trial in study.trials} == {"completed"}
    module.show(study, tmp_path)
    assert "samples_per_second" in capsys.readouterr().out
    assert (tmp_path / "trials.png").stat().st_size > 10_000
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_mnist(tmp_path, capsys):
    module = example("mnist")
    x, y = module.load()
    assert x.shape == (5000, 28, 28, 1)
    assert (x.min(), x.max()) == (0, 1)
    np.testing.assert_allclose(np.bincount(y[:3000]), 300, atol=40)
    study = module.search(
        x[:500], y[:500], tmp_path, batch_sizes=(64, 256), epochs=2, strategy="grid"
    )
    assert [trial.last.accumulation_steps for trial in study.trials] == [1, 2]
    check(module, study, tmp_path, capsys)


def test_cifar10(tmp_path, capsys):
    module = example("cifar10")
    study = module.search(*images(160), tmp_path, batch_sizes=(16, 32), seconds=10)
    assert study.trials[0].objective.name == "seconds_to_target"
    check(module, study, tmp_path, capsys)


def test_python_functions(tmp_path, capsys):
    module = example("python_functions")
    x, y = module.load()
    assert len(x) > 2000
    assert set(y) == set(range(len(module.PACKAGES)))
    assert 0.2 < (x == 0).mean() < 0.6  # Padding, which is masked.
    study = module.search(
        x[:500], y[:500], tmp_path, batch_sizes=(64, 256), epochs=1, strategy="grid"
    )
    check(module, study, tmp_path, capsys)


def test_film_reviews(tmp_path, capsys):
    module = example("film_reviews")
    x, y = reviews(150, module.LENGTH, module.VOCABULARY)
    study = module.search(x, y, tmp_path, batch_sizes=(100,), epochs=1)
    assert [trial.learning_rate for trial in study.trials] == pytest.approx([3e-4, 1e-3])
    assert {trial.last.accumulation_steps for trial in study.trials} == {2}
    check(module, study, tmp_path, capsys)
