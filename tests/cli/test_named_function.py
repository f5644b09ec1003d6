import sys

import numpy as np
import pytest

from kbatch.cli.arguments import memory_size, named, named_data, named_x_y, split_name


@pytest.mark.parametrize("text", ["given:build", "given.py:build", "given:Nested.build"])
def test_a_function_is_found_from_the_present_folder(folder, text):
    assert named(text, "--build")().count_params() == 8 * 3 + 3


def test_a_file_elsewhere_is_found_by_its_path(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert callable(named(f"{folder}/given.py:build", "--build"))


@pytest.mark.parametrize("name", ["colorsys", "test"])
def test_a_module_named_as_one_of_the_standard_library_is_to_be_renamed(folder, name):
    (folder / f"{name}.py").write_text("")
    for text in (f"{name}.py:build", f"{name}:build"):
        with pytest.raises(ValueError, match=rf"rename {name}\.py.*Received: --build {name}"):
            split_name(text, "--build")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("given", "package.module:function"),
        (":build", "package.module:function"),
        ("other_module:build", "not found from"),
        ("other_package.module:build", "not found from"),
    ],
)
@pytest.mark.parametrize("look_up", [named, split_name])
def test_a_wrong_name_says_what_to_give(folder, text, message, look_up):
    with pytest.raises(ValueError, match=message) as caught:
        look_up(text, "--build")
    assert f"Received: --build {text}" in str(caught.value)


def test_names_in_a_module_are_seen_once_it_is_imported(folder):
    split_name("given:bild", "--build")
    assert "given" not in sys.modules
    with pytest.raises(ValueError, match="one of Nested, arrays, broken, build, data"):
        named("given:bild", "--build")


def test_data_are_a_pair_a_function_of_the_batch_size_or_a_dataset(folder):
    for text in ("given:arrays", "given:pair"):
        x, y = named_x_y(text)
        assert (x.shape, y.shape) == ((200, 8), (200,))
        assert len(named_data(text)) == 2
    function, nothing = named_x_y("given:sized")
    assert nothing is None
    for sized in (function, named_data("given:sized")):
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
