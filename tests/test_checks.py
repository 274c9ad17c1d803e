import ml_dtypes
import numpy as np
import pytest

from vlcache_jax.common.checks import check_flags, check_whole, exceeds, is_finite, parse_bytes, parse_counts, short


@pytest.mark.parametrize(
    ("value", "count"), [(5, 5), ("5", 5), ("4GiB", 2**32), ("1.5 mb", 1_500_000), (0, 0), ("10 B", 10)]
)
def test_bytes(value, count):
    assert parse_bytes(value, "host_bytes") == count


@pytest.mark.parametrize("value", ["2K", "", -1, "-1", True, None, 1.5, "9" * 400, "GiB"])
def test_no_bytes(value):
    with pytest.raises(ValueError, match=r"^host_bytes must be a non-negative number of bytes, such as"):
        parse_bytes(value, "host_bytes")


def test_counts():
    assert parse_counts("1024, 3072,5", "image_tokens") == (1024, 3072, 5)


@pytest.mark.parametrize("value", ["", "1,", "0", "1,-2", "1.5", "4K", "\u0663x", "9" * 400])
def test_no_counts(value):
    with pytest.raises(ValueError, match=r"^image_tokens must be positive integers like \"1024,3072\", got"):
        parse_counts(value, "image_tokens")


@pytest.mark.parametrize("value", ["no", "", 0, 1, None, []])
def test_only_a_bool_is_a_flag(value):
    check_flags(verify=True, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^use_tqdm must be a bool, got"):
        check_flags(verify=True, use_tqdm=value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_what_is_finite(dtype, value):
    array = np.array(
        [0, -0.0, 1, ml_dtypes.finfo(dtype).max, ml_dtypes.finfo(dtype).smallest_subnormal] * 60_000, dtype
    )
    assert is_finite(array.reshape(5, -1))
    assert is_finite(array[:0])
    array[-1] = value
    assert not is_finite(array)


@pytest.mark.parametrize(
    ("bounds", "given", "wanted"),
    [
        ((1,), 0, "a positive integer"),
        ((1,), True, "a positive integer"),
        ((1,), 2.0, "a positive integer"),
        ((1,), None, "a positive integer"),
        ((0,), -1, "an integer of at least 0"),
        ((1, 9), 10, "an integer from 1 to 9"),
    ],
)
def test_whole_numbers(bounds, given, wanted):
    with pytest.raises(ValueError, match=rf"^k must be {wanted}, got {given}$"):
        check_whole("k", given, *bounds)
    check_whole("k", 9, *bounds)


def test_none_may_stand_for_a_whole_number():
    check_whole("k", None, 1, or_none=True)
    with pytest.raises(ValueError, match=r"^k must be a positive integer or None, got 'a'$"):
        check_whole("k", "a", 1, or_none=True)


class Unwritten(int):
    """Counts how often it is written."""

    written = 0

    def __repr__(self):
        type(self).written += 1
        return "1"


def nested(levels):
    value = [1]
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("a" * 10**6, "'" + "a" * 71 + "... (1000000 characters)"),
        (["a" * 10**6, 2], "['" + "a" * 70 + "... (2 entries)"),
        ([1] * 10**6, "[1, 1, 1, 1, 1, 1, 1, 1]... (1000000 entries)"),
        (
            {str(i): i for i in range(10**5)},
            "{'0': 0, '1': 1, '2': 2, '3': 3, '4': 4, '5': 5, '6': 6, '7': 7}... (100000 entries)",
        ),
        ([[1] * 10**5], "[[1, 1, 1, 1, 1, 1, 1, 1]]... (1 entries)"),
        (nested(10**5), "[[[[]]]]... (1 entries)"),
        ([1, "b", None], "[1, 'b', None]"),
        (nested(5000), "list too large to show"),
    ],
)
def test_values_in_errors_are_short(value, shown):
    assert short(value)[:150] == shown[:150]


def test_of_a_large_value_the_beginning_alone_is_written():
    short([Unwritten(1)] * 10**6)
    assert Unwritten.written < 10


@pytest.mark.parametrize(("value", "size"), [("abc", 4), ([1, 2], 5), ({"a": [1]}, 7), (None, 1), ([[], {}], 5)])
def test_how_much_a_value_holds(value, size):
    assert not exceeds(value, size)
    assert exceeds(value, size - 1)
