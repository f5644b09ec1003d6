import math
import re

import numpy as np
import pytest

from kbatch.analysis.intervals import Estimate
from kbatch.page.numbers import format_number, left_text, setting, speed_text


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_format_number_rounds(digits):
    rng = np.random.default_rng(digits)
    for value in rng.choice([-1, 1], 500) * 10 ** rng.uniform(-9, 9, 500):
        read = float(format_number(value, digits).replace(",", ""))
        exponent = math.floor(math.log10(abs(value))) + 1 - digits
        assert abs(read - value) <= 0.5000001 * 10**exponent


@pytest.mark.parametrize(
    ("function", "values", "texts"),
    [
        (format_number, (0, 12345.6, 999.7, 0.97, 1.23e-5), "0|12,300|1,000|0.970|1.23e-05"),
        (setting, (0.001, 0.1, 1.0, 100.0, 1e-5, 0), "0.001|0.1|1|100|1e-05|0"),
        (left_text, (1.7e-16, 0.9), "less than 1 s left|less than 1 s left"),
        (left_text, (1.2, 119.0, 1860.0), "1.2 s left|2 min left|31 min left"),
    ],
)
def test_texts_of_numbers(function, values, texts):
    assert "|".join(map(function, values)) == texts


@pytest.mark.parametrize(
    ("speed", "text"),
    [
        (1.61, "1.61 times as fast as A"),
        (0.0688, "14.5 times slower than A"),
        (Estimate(2.0, 1.6, 2.5), "2.00 (1.60 to 2.50) times as fast as A"),
        (Estimate(0.5, 0.4, 0.625), "2.00 (1.60 to 2.50) times slower than A"),
        (Estimate(0.5, None, None), "2.00 times slower than A"),
    ],
)
def test_speed_text(speed, text):
    assert speed_text(speed, "A") == text
    assert speed_text(speed) == re.sub(" (as|than) A$", "", text)
