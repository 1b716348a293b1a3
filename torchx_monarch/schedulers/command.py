# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the ``torchx`` command shows of a user's mistake: the message, and exit code 1, in place of a traceback.

TorchX's command line catches such errors in ``torchx run`` alone (``torchx.cli.cmd_run.CmdRun._run_inner``), but not
those of ``-cfg``, which it reads before (``_run_from_cli_args``), and none of ``log``, ``list``, ``cancel`` and the
others. It leaves its runner, and so closes the schedulers, while the error is on its way: there it is taken up.
"""

from __future__ import annotations

import os
import sys
import threading

from torchx.specs import CfgVal, InvalidRunConfigException, runopts
from torchx.specs.finder import ComponentValidationException
from torchx.util.types import to_dict

_MISTAKES = (ComponentValidationException, InvalidRunConfigException)
"""The bases of all errors whose message is for a user."""

_SUBCOMMANDS = ("cancel", "delete", "describe", "list", "log", "run", "status")


def subcommand() -> str:
    """Which subcommand of ``torchx`` this process runs; empty in any other program."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if os.path.basename(sys.argv[0]) != "torchx" and getattr(main, "name", "") != "torchx.cli.main":
        return ""
    return next((word for word in sys.argv[1:] if word in _SUBCOMMANDS), "")


def end_plainly() -> None:
    """End the command with the message of the mistake that is on its way through it, if one is.

    Raises:
        SystemExit: with the message, for exit code 1.
    """
    error = sys.exc_info()[1]
    if isinstance(error, _MISTAKES) and subcommand():
        raise SystemExit(str(error)) from None


def keep_threads_quiet() -> None:
    """Have a thread of ``torchx log`` that ends with a mistake print no traceback: the command raises it once more."""
    before = threading.excepthook
    if not subcommand() or getattr(before, "quiet", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, _MISTAKES):
            before(args)

    hook.quiet = True  # type: ignore[attr-defined]
    threading.excepthook = hook


class RunOptions(runopts):  # type: ignore[misc]
    """Run options that say which one has a value of another type."""

    def cfg_from_str(self, cfg_str: str) -> dict[str, CfgVal]:
        """As TorchX's, whose error for ``grace=abc`` is that of ``int``.

        Raises:
            InvalidRunConfigException: an option is not known, or its value is of another type.
        """
        try:
            parsed: dict[str, CfgVal] = super().cfg_from_str(cfg_str)
            return parsed
        except (ValueError, TypeError) as error:
            raise InvalidRunConfigException(self._why(cfg_str, str(error)), cfg_str, {}) from None

    def _why(self, cfg_str: str, error: str) -> str:
        try:
            given = to_dict(cfg_str)
        except ValueError:
            return f"-cfg {cfg_str!r} is not of the form OPTION=VALUE,OPTION=VALUE: {error}"
        for name, text in given.items():
            option = self.get(name)
            try:
                if option is not None:
                    option.cast_to_type(text)
            except (ValueError, TypeError):
                wanted = getattr(option.opt_type, "__name__", option.opt_type)
                return f"Run option `{name}` is {text!r}, which is no {wanted}"
        return f"-cfg {cfg_str!r}: {error}"
