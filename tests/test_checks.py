import pytest

from vlcache_jax.checks import check_flags, parse_bytes


@pytest.mark.parametrize(
    ("value", "count"), [(5, 5), ("5", 5), ("4GiB", 2**32), ("1.5 mb", 1_500_000), (0, 0), ("10 B", 10)]
)
def test_bytes(value, count):
    assert parse_bytes(value, "host_bytes") == count


@pytest.mark.parametrize("value", ["2K", "", -1, "-1", True, None, 1.5, "9" * 400, "GiB"])
def test_no_bytes(value):
    with pytest.raises(ValueError, match=r"^host_bytes must be bytes of at least 0, as a number or like"):
        parse_bytes(value, "host_bytes")


@pytest.mark.parametrize("value", ["no", "", 0, 1, None, []])
def test_only_a_bool_is_a_flag(value):
    check_flags(verify=True, use_tqdm=False)
    with pytest.raises(ValueError, match=r"^use_tqdm must be a bool, got"):
        check_flags(verify=True, use_tqdm=value)
