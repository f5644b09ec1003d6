import math

import numpy as np
import pytest

from kbatch.page.numbers import format_number, setting


@pytest.mark.parametrize("digits", [1, 2, 3, 4])
def test_the_text_reads_back_as_the_rounded_number(digits):
    rng = np.random.default_rng(digits)
    for value in rng.choice([-1, 1], 500) * 10 ** rng.uniform(-9, 9, 500):
        read = float(format_number(value, digits).replace(",", ""))
        assert abs(read - value) <= 0.5000001 * 10 ** (
            math.floor(math.log10(abs(value))) + 1 - digits
        )


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (12345.6, "12,300"), (999.7, "1,000"), (0.97, "0.970"), (0.0000123, "1.23e-05")],
)
def test_three_significant_digits(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.001, "0.001"), (0.1, "0.1"), (1.0, "1"), (100.0, "100"), (1e-5, "1e-05"), (0, "0")],
)
def test_a_setting_has_no_trailing_zeros(value, text):
    assert setting(value) == text
