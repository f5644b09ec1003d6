import argparse
import sys

import numpy as np
import pytest

from kbatch.cli.arguments import memory_size, name_text, named, named_data, named_x_y


@pytest.mark.parametrize("text", ["given:build", "given.py:build", "given:Nested.build"])
def test_a_function_is_found_from_the_present_folder(folder, text):
    assert named(name_text(text))().count_params() == 8 * 3 + 3


def test_a_file_elsewhere_is_found_by_its_path(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert callable(named(name_text(f"{folder}/given.py:build")))


@pytest.mark.parametrize("name", ["colorsys", "test"])
def test_a_module_named_as_one_of_the_standard_library_is_to_be_renamed(folder, name):
    (folder / f"{name}.py").write_text("")
    for text in (f"{name}.py:build", f"{name}:build"):
        with pytest.raises(argparse.ArgumentTypeError, match=rf"rename {name}\.py.*: {name}"):
            name_text(text)


def test_names_in_a_module_are_seen_once_it_is_imported(folder):
    name_text("given:bild")
    assert "given" not in sys.modules
    with pytest.raises(ValueError, match="one of Nested, arrays, broken, build, data"):
        named("given:bild")


def test_data_are_a_pair_a_function_of_the_batch_size_or_a_dataset(folder):
    name_text("given:data")  # Its folder is searched from then on.
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
    ("text", "size"),
    [("2GiB", 2**31), ("1.5 MiB", 1572864), ("500MB", 500_000_000), ("4096", 4096)],
)
def test_a_size_of_memory_is_read_with_its_unit(text, size):
    assert memory_size(text) == size
