# SPDX-License-Identifier: BSD-3-Clause
"""The result of one check of ``torchx monarch doctor``."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "warn", "fail"]


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        level: ``fail`` if jobs cannot run, ``warn`` if a scheduler cannot be used that nobody has asked for.
        value: what was found; empty if nothing was.
        advice: what is wrong and how to fix it; empty if nothing is wrong.
    """

    level: Level
    what: str
    value: str = ""
    advice: str = ""

    def line(self) -> str:
        """Return the result as one line of text."""
        found = "; ".join(filter(None, (self.value, self.advice)))
        return f"{self.level:4}  {self.what}: {found}"


def check(what: str, value: str, fail: str = "") -> CheckResult:
    """Return a result; ``fail`` says why jobs cannot run, and how to fix it."""
    return CheckResult("fail" if fail else "ok", what, value, fail)
