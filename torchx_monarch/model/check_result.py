# SPDX-License-Identifier: BSD-3-Clause
"""The result of one check of ``torchx monarch doctor``."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CheckResult:
    """The result of one check.

    Attributes:
        value: what was found; empty if nothing was.
        advice: why jobs cannot run, and how to fix it; empty if nothing is wrong.
    """

    what: str
    value: str = ""
    advice: str = ""

    @property
    def level(self) -> str:
        """``ok`` or ``fail``."""
        return "fail" if self.advice else "ok"

    def line(self) -> str:
        """Return the result as one line of text."""
        found = "; ".join(filter(None, (self.value, self.advice)))
        return f"{self.level:4}  {self.what}: {found}"
