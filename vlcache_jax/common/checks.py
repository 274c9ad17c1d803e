"""Checks of arguments and arrays, with errors that show the value. Names and sizes of the codecs of stored KV.

The codecs themselves are in `vlcache_jax.pallas_kernels.link.codec`, which is slow to import.
"""

from __future__ import annotations

import difflib
import ipaddress
import itertools
import math
import re
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    import numpy as np

GROUP = 32  # values that share a scale of `int4`

SIZES: dict[str, tuple[int, int | None]] = {"int8": (8, None), "int4": (4, GROUP)}
"""Bits of a code, and the number of values that share a scale; None: all values of a head."""


_FEW = 8  # names that an error lists
_LONGEST_NAME = 80  # characters that are compared with others
_PIECE = 1 << 18  # values that fit into a core's cache
_SHOWN = 1 << 14  # characters and entries up to which `repr` is applied to the full value
_ENTRIES, _LEVELS = 8, 3  # entries and nesting levels shown of a larger value
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}  # fmt: skip


def is_a(value: Any, kind: Any) -> TypeGuard[Any]:
    """Return whether a value is an instance of `kind`, a type or a tuple of types. True and False do not count as
    integers.
    """
    return isinstance(value, kind) and not isinstance(value, bool)


def check_whole(name: str, value: Any, minimum: int, maximum: float = math.inf, *, or_none: bool = False) -> None:
    """Check that a value is an integer from `minimum` to `maximum`, or None if `or_none`.

    Raises:
      ValueError: it is not; the message begins with `name`.
    """
    if (is_a(value, int) and minimum <= value <= maximum) or (value is None and or_none):
        return
    bounded = f"an integer from {minimum} to {maximum}" if maximum < math.inf else f"an integer of at least {minimum}"
    wanted = "a positive integer" if (minimum, maximum) == (1, math.inf) else bounded
    raise ValueError(f"{name} must be {wanted}{' or None' if or_none else ''}, got {short(value)}")


def unknown(name: Any, known: Collection[str], instead: Mapping[str, str] | None = None, *, where: str = "") -> str:
    """Return the error message for an unknown field, with the known fields if they are few and the closest of them.

    Args:
      name: the unknown field.
      known: names of the known fields.
      instead: remedies by the names of fields that other APIs have.
      where: the object that has the field, such as "body".
    """
    message = f"unknown field {short(name)}{' in ' * bool(where)}{where}"
    if len(known) <= _FEW:
        message += f"; expected one of {', '.join(known)}"
    if (remedy := (instead or {}).get(name)) is not None:
        return f"{message}; {remedy}"
    close = difflib.get_close_matches(str(name)[:_LONGEST_NAME], known, 1)
    return f"{message}; did you mean {close[0]!r}?" if close else message


def check_flags(**flags: Any) -> None:
    """Check that each argument is True or False. Other values would be misread: "no" would count as True.

    Raises:
      ValueError: one is not; the message names it.
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be a bool, got {short(value)}")


def check_text(text: Any, name: str, expected: str = "a string") -> None:
    """Check that `text` is a string without unpaired surrogates.

    Raises:
      ValueError: it is not; the message begins with `name`.
    """
    if not isinstance(text, str):
        raise ValueError(f"{name} must be {expected}, got {short(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be text, got {text[error.start]!r} at character {error.start}, half of a surrogate pair"
        ) from error


def is_loopback(host: str) -> bool:
    """Return whether an address is a loopback address or "localhost"."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def parse_bytes(value: int | str, name: str) -> int:
    """Return a number of bytes from an integer or a string with a unit (KB = 1000 bytes, KiB = 1024).

    Raises:
      ValueError: it is neither, or negative; the message begins with `name`.
    """
    if is_a(value, int) and value >= 0:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", value.upper())
        if match and match[2] in _UNITS:
            return int(float(match[1]) * _UNITS[match[2]])
    raise ValueError(
        f'{name} must be a non-negative number of bytes, such as 1000000, "4GiB" or "500MB", got {value!r}'
    )


def parse_counts(text: str, name: str) -> tuple[int, ...]:
    """Return positive integers from a string such as "1024,3072".

    Raises:
      ValueError: an entry is not a positive integer; the message begins with `name`.
    """
    parts = text.split(",")
    if not all(re.fullmatch(r"\s*0*[1-9]\d{0,17}\s*", part) for part in parts):
        raise ValueError(f'{name} must be positive integers like "1024,3072", got {short(text)}')
    return tuple(map(int, parts))


def parse_rates(text: str, name: str) -> tuple[float, ...]:
    """Return numbers above 0 from a string such as "0.5,1,2".

    Raises:
      ValueError: an entry is not a number above 0; the message begins with `name`.
    """
    try:
        rates = tuple(map(float, text.split(",")))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ValueError(f'{name} must be numbers above 0 like "0.5,1,2", got {short(text)}')
    return rates


def shorten(text: str, limit: int = 200) -> str:
    """Return a text for an error message; a long one is cut and its length is appended."""
    return text if len(text) <= limit else f"{text[: 3 * limit // 5]}... ({len(text)} characters)"


def short(value: Any, limit: int = 120) -> str:
    """Return the `repr` of a value, cut to about `limit` characters. If `repr` fails, return the name of the type.

    Only the beginning of a large value is read.
    """
    try:
        if not exceeds(value, _SHOWN):
            return shorten(repr(value), limit)
        kind = "characters" if isinstance(value, str | bytes) else "entries"
        return f"{repr(_beginning(value, limit, _LEVELS))[: 3 * limit // 5]}... ({len(value)} {kind})"
    except (ValueError, RecursionError):  # integers of thousands of digits; lists in lists in lists
        return f"{type(value).__name__} too large to show"


def exceeds(value: Any, limit: int) -> bool:
    """Return whether a JSON value has more than `limit` characters and entries, nested ones included.

    The search stops as soon as the count exceeds `limit`.
    """
    pending = [value]
    while pending and limit >= 0:
        one = pending.pop()
        is_many = isinstance(one, dict | list | tuple)
        limit -= 1 + len(one) if is_many or isinstance(one, str | bytes) else 1
        if is_many and limit >= 0:
            pending += [*one.keys(), *one.values()] if isinstance(one, dict) else one
    return limit < 0


def _beginning(value: Any, limit: int, levels: int) -> Any:
    """Return the first characters or entries of a value, down to `levels` nesting levels."""
    if isinstance(value, str | bytes):
        return value[:limit]
    if not isinstance(value, dict | list | tuple):
        return value
    first = itertools.islice(value.items() if isinstance(value, dict) else value, _ENTRIES if levels else 0)
    kind = next(kind for kind in (dict, list, tuple) if isinstance(value, kind))
    if kind is dict:
        return {_beginning(key, limit, 0): _beginning(one, limit, levels - 1) for key, one in first}
    return kind(_beginning(one, limit, levels - 1) for one in first)


def is_finite(array: np.ndarray) -> bool:
    """Return whether an array of floats has no infinities and no NaN, without copying it.

    Both have all exponent bits set. Testing these bits is several times faster than `isfinite` in bfloat16.

    Args:
      array: contiguous array of float32, bfloat16, float16 or float8_e4m3fn, which has one NaN and no infinities.
    """
    import numpy as np  # imported here: most callers check only arguments and do not need it

    all_set = np.uint8(0x7F) if array.itemsize == 1 else np.array(np.inf, array.dtype).view(f"u{array.itemsize}")
    bits = array.reshape(-1).view(all_set.dtype)
    pieces = (bits[i : i + _PIECE] for i in range(0, len(bits), _PIECE))
    return not any(np.any(piece & all_set == all_set) for piece in pieces)
