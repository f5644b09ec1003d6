import sys

import numpy as np
import pytest

from kbatch.cli.arguments import memory_size, named, named_data, named_x_y, split_name

MODULE = """
import numpy as np
class Nested:
    build = staticmethod(lambda: "nested")
def build(): return "built"
built = build()
def data(): return np.zeros(3), np.ones(3)
def batches(batch_size): return f"{batch_size} rows"
pair = (np.zeros(2), np.ones(2))
def three(): return 1, 2, 3
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "given_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("given_module", None)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("given_module:build", "built"),
        ("given_module.py:build", "built"),
        ("given_module:Nested.build", "nested"),
    ],
)
def test_a_function_is_found_from_the_present_folder(folder, text, answer):
    assert named(text, "--build")() == answer


def test_a_file_elsewhere_is_found_by_its_path(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert named(f"{folder}/given_module.py:build", "--build")() == "built"


@pytest.mark.parametrize("name", ["colorsys", "test"])
@pytest.mark.parametrize("look_up", [named, split_name])
def test_a_module_named_as_one_of_the_standard_library_is_to_be_renamed(folder, name, look_up):
    (folder / f"{name}.py").write_text(MODULE)
    for text in (f"{name}.py:build", f"{name}:build"):
        with pytest.raises(ValueError, match=rf"rename {name}\.py.*Received: --build {name}"):
            look_up(text, "--build")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("given_module", "package.module:function"),
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
    split_name("given_module:bild", "--build")
    assert "given_module" not in sys.modules
    with pytest.raises(ValueError, match="one of Nested, batches, build, data, three"):
        named("given_module:bild", "--build")


def test_data_are_a_pair_a_function_of_the_batch_size_or_a_dataset(folder):
    for text in ("given_module:data", "given_module:pair"):
        x, y = named_x_y(text)
        assert (float(np.sum(x)), float(np.sum(y))) == (0.0, len(y))
        assert len(named_data(text)) == 2
    function, nothing = named_x_y("given_module:batches")
    assert (function(8), nothing) == ("8 rows", None)
    assert named_data("given_module:batches")(8) == "8 rows"
    assert named_x_y("given_module:build") == ("built", None)
    with pytest.raises(ValueError, match="gives 3 values"):
        named_x_y("given_module:three")
    assert named_data("given_module:three") == (1, 2, 3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2**31),
        ("1.5 MiB", 1572864),
        ("500MB", 500_000_000),
        ("4096", 4096),
    ],
)
def test_a_size_of_memory_is_read_with_its_unit(text, size):
    assert memory_size(text) == size
