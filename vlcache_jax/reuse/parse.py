"""From what users write as `reuse` to a policy."""

from __future__ import annotations

import difflib
import functools
import numbers
import os
import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from os import PathLike
from typing import Any

from vlcache_jax.checks import is_a, short, shorten
from vlcache_jax.reuse.policies import EPIC, MPIC, Ends, Exact, Off, Policy, Scheduled, Spread, StaticRatio, TwoPass
from vlcache_jax.reuse.schedule import Schedule
from vlcache_jax.reuse.selection import NAMED, Asked

_DIGITS = 30
_DECIMAL = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|nan|[+-]?inf", re.IGNORECASE)
_WITH_COUNT: dict[str, Callable[[int], Policy]] = {"mpic": MPIC, "epic": EPIC}
_WITH_SCHEDULE: dict[str, Callable[..., Policy]] = {"spread": Spread, "shift": functools.partial(Spread, shift=True)}
_WITH_RATIO: dict[str, Callable[[Fraction], Policy]] = {"ends": Ends, **_WITH_SCHEDULE}
# What "approximate" stands for: of all policies that compute at most 3 % of rows x layers the one with the best answers
# (docs/research/reuse_study.md).
APPROXIMATE = "shift-0.03"
_NAMED: dict[str, Policy] = {
    "off": Off(),
    "exact": Exact(),
    "full": StaticRatio(Fraction(0)),
    "full-two-pass": TwoPass(),
}


def parse_policy(reuse: Any) -> Policy:
    """The policy that a user's `reuse` stands for.

    Args:
      reuse: "off", "exact", "approximate" (the recommended policy), "full" (ratio 0), "full-two-pass", a ratio from 0
        to 1 as a number or a decimal string, "mpic-K", "epic-K", "ends-R", "spread-R", "shift-R", "cacheblend-R" and
        others of `selection.NAMED`, the path of a schedule file, by itself or behind "spread-", "shift-" or "asked-",
        a `Schedule` or a `Policy`.

    Raises:
      ValueError: something else.
    """
    # Objects stand for themselves, and a number is a ratio.
    if isinstance(reuse, Schedule):
        return Scheduled(reuse)
    if isinstance(reuse, Policy) and not isinstance(reuse, type):
        return reuse
    if is_a(reuse, (numbers.Real, Decimal)):
        number = Decimal(reuse) if isinstance(reuse, int) else reuse  # writes integers of any length
        return StaticRatio(number if isinstance(number, Fraction) else _fraction(str(number)))
    if isinstance(reuse, str):
        # Names by themselves.
        if reuse == "approximate":
            reuse = APPROXIMATE
        if reuse in _NAMED:
            return _NAMED[reuse]
        scheduled = {**_WITH_SCHEDULE, "asked": Asked}
        # Names with a count, with the path of a schedule, and with a ratio; a ratio may stand alone.
        name, _, rest = reuse.partition("-")
        if name in _WITH_COUNT and rest.isdecimal():
            if len(rest) > _DIGITS:
                raise ValueError(f"reuse must be {name}-K with a K of at most {_DIGITS} digits, got {short(reuse)}")
            return _WITH_COUNT[name](int(rest))
        if name in scheduled and rest.endswith(".json") and not os.path.isfile(reuse):
            return scheduled[name](schedule=Schedule.load(rest))
        named: dict[str, Callable[[Fraction], Policy]] = {"": StaticRatio, **_WITH_RATIO, **NAMED}
        for name, policy in named.items():
            prefix = name and f"{name}-"
            if reuse.startswith(prefix) and _DECIMAL.fullmatch(ratio := reuse.removeprefix(prefix)):
                return policy(_fraction(ratio, prefix))
    # What is left may be the path of a schedule.
    if isinstance(reuse, PathLike) or (isinstance(reuse, str) and (reuse.endswith(".json") or os.path.isfile(reuse))):
        return Scheduled(Schedule.load(reuse))
    close = difflib.get_close_matches(reuse, ["approximate", *_NAMED], 1) if isinstance(reuse, str) else []
    raise ValueError(
        'reuse must be "off", "exact", "approximate", "full", a ratio from 0 to 1, the path of a schedule file, a '
        'Schedule, a Policy, or the name of another policy such as "mpic-32" or "shift-0.1", '
        f"got {short(reuse)}{f'; is it {close[0]!r}?' if close else ''}"
    )


def _fraction(text: str, prefix: str = "") -> Fraction:
    """The exact value of a decimal: 0.29 of 100 tokens are 29, where floating point says 28."""
    try:
        decimal = Decimal(text)
    except InvalidOperation:  # an exponent of many digits
        decimal = Decimal("nan")
    exponent = decimal.as_tuple().exponent  # a letter where the value is not finite
    if not (isinstance(exponent, int) and exponent >= -_DIGITS and 0 <= decimal <= 1):
        wanted = f"{prefix}R with a ratio R" if prefix else "a ratio"
        raise ValueError(f"reuse must be {wanted} from 0 to 1 of at most {_DIGITS} digits, got {prefix}{shorten(text)}")
    return Fraction(decimal)
