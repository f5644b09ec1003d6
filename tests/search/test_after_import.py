import importlib
import sys

from kbatch.search.distributed_script import after_import


def test_a_module_is_changed_once_it_is_imported_and_no_other(tmp_path, monkeypatch):
    for name in ("first_of_two", "second_of_two"):
        (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    seen = []

    def change(module):
        seen.append(module.__name__)
        module.value += 1

    after_import("second_of_two", change)
    assert importlib.import_module("first_of_two").value == 1
    assert seen == []
    module = importlib.import_module("second_of_two")
    assert module.value == 2
    assert module.__file__ == str(tmp_path / "second_of_two.py")
    assert importlib.import_module("second_of_two").value == 2
    assert seen == ["second_of_two"]
    assert sys.meta_path == finders
