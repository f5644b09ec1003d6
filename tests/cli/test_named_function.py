import argparse
import sys

import numpy as np
import pytest

from kbatch.cli.arguments import memory_size, milliseconds, name_text, named, named_data, named_x_y


@pytest.mark.parametrize("text", ["given:build", "given.py:build", "given:Nested.build"])
def test_named_function_in_the_working_directory(folder, text):
    assert named(name_text(text))().count_params() == 8 * 3 + 3


def test_named_function_in_another_folder(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert callable(named(name_text(f"{folder}/given.py:build")))


@pytest.mark.parametrize("name", ["colorsys", "test"])
def test_name_text_module_of_the_standard_library(folder, name):
    (folder / f"{name}.py").write_text("")
    for text in (f"{name}.py:build", f"{name}:build"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"rename {name}\.py.*: {name}"):
            name_text(text)


def test_named_function_that_does_not_exist(folder):
    name_text("given:bild")
    assert "given" not in sys.modules
    with pytest.raises(ValueError, match="one of Nested, arrays, broken, build, data"):
        named("given:bild")


def test_named_data_forms(folder):
    name_text("given:data")  # Adds its folder to the path.
    for text in ("given:arrays", "given:pair"):
        x, y = named_x_y(text)
        assert (x.shape, y.shape) == ((200, 8), (200,))
        assert len(named_data(text)) == 2
    function, nothing = named_x_y("given:sized")
    assert nothing is None
    for sized in (function, named_data("given:sized"), named_data("given:placed")):
        assert next(iter(sized(16)))[0].shape == (16, 8)
    dataset, nothing = named_x_y("given:data")
    assert nothing is None and np.shape(next(iter(dataset))[0]) == (8, 8)
    with pytest.raises(ValueError, match="gives 3 values"):
        named_x_y("given:three")
    assert named_data("given:three") == (1, 2, 3)


@pytest.mark.parametrize(
    ("function", "texts", "values"),
    [
        (memory_size, ("2GiB", "1.5 MiB", "500MB", "4096"), (2**31, 1572864, 500_000_000, 4096)),
        (milliseconds, ("20ms", "500us", "0.1s", " 1.5 ms "), (20, 0.5, 100, 1.5)),
    ],
)
def test_numbers_with_units(function, texts, values):
    assert tuple(map(function, texts)) == pytest.approx(values)
