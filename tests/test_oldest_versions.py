"""`make test-versions` installs the oldest versions that setup.cfg allows."""

import configparser
import re

from code_blocks import ROOT


def test_the_oldest_versions_are_the_lower_bounds():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(ROOT / "setup.cfg")
    required = setup["options"]["install_requires"].split()
    bounds = dict(re.match(r"([\w-]+)>=([\d.]+)", one).groups() for one in required)
    lines = (ROOT / "tests" / "oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert list(pins) == list(bounds)
    for name, version in pins.items():
        assert f"{version}.".startswith(f"{bounds[name]}."), name
