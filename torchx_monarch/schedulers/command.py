# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Have the ``torchx`` command report a user's mistake by its message and exit code 1 instead of a traceback.

TorchX's command line catches such errors only in ``torchx run`` (``torchx.cli.cmd_run.CmdRun._run_inner``). It catches
neither those of ``-cfg``, which it parses earlier (``_run_from_cli_args``), nor those of ``log``, ``list``, ``cancel``
and the other subcommands. While such an error propagates, TorchX leaves its runner's context and so closes the
schedulers. ``MonarchScheduler.close`` then calls ``exit_on_user_error``.
"""

from __future__ import annotations

import os
import sys
import threading

from torchx.specs import CfgVal, InvalidRunConfigException, runopts
from torchx.specs.finder import ComponentValidationException
from torchx.util.types import to_dict

from torchx_monarch.model.spelling import did_you_mean

_USER_ERRORS = (ComponentValidationException, InvalidRunConfigException)
"""Base classes of all errors whose message is meant for a user."""

_SUBCOMMANDS = ("cancel", "delete", "describe", "list", "log", "run", "status")


def subcommand() -> str:
    """Return the subcommand of ``torchx`` that this process runs; empty in any other program."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if os.path.basename(sys.argv[0]) != "torchx" and getattr(main, "name", "") != "torchx.cli.main":
        return ""
    return next((word for word in sys.argv[1:] if word in _SUBCOMMANDS), "")


def exit_on_user_error() -> None:
    """Exit the ``torchx`` command with the message of the user's mistake that is being handled, if any.

    Raises:
        SystemExit: a user's mistake is being handled; carries its message, for exit code 1.
    """
    error = sys.exc_info()[1]
    if isinstance(error, _USER_ERRORS) and subcommand():
        raise SystemExit(str(error)) from None


def keep_threads_quiet() -> None:
    """Suppress the tracebacks of threads that end with a user's mistake: ``torchx log`` raises it again."""
    before = threading.excepthook
    if not subcommand() or getattr(before, "quiet", False):
        return

    def hook(args: threading.ExceptHookArgs) -> None:
        if not isinstance(args.exc_value, _USER_ERRORS):
            before(args)

    hook.quiet = True  # type: ignore[attr-defined]
    threading.excepthook = hook


class CheckedRunopts(runopts):  # type: ignore[misc]
    """Run options whose parse errors name the option that has a value of the wrong type."""

    def cfg_from_str(self, cfg_str: str) -> dict[str, CfgVal]:
        """Parse the text of ``-cfg``. TorchX's error for ``grace=abc`` is only that of ``int``.

        Raises:
            InvalidRunConfigException: the text is malformed, an option is unknown, or a value has the wrong type.
        """
        try:
            parsed: dict[str, CfgVal] = super().cfg_from_str(cfg_str)
            return parsed
        except InvalidRunConfigException as error:
            names = [name for name, _ in self]
            hint = did_you_mean(error.cfg_key, names)
            if error.cfg_key in names or not hint:
                raise
            reason = f"Unknown run option `{error.cfg_key}`.{hint} Valid options are: {', '.join(sorted(names))}"
            raise InvalidRunConfigException(reason, error.cfg_key, to_dict(cfg_str)) from None
        except (ValueError, TypeError, IndexError) as error:
            raise InvalidRunConfigException(self._why(cfg_str, str(error)), cfg_str, {}) from None

    def _why(self, cfg_str: str, error: str) -> str:
        try:
            given = to_dict(cfg_str)
        except ValueError:
            hint = " (a value that contains = needs quotes: OPTION='A=B')" if cfg_str.count("=") > 1 else ""
            return f"-cfg {cfg_str!r} is not of the form OPTION=VALUE,OPTION=VALUE{hint}: {error}"
        for name, text in given.items():
            option = self.get(name)
            try:
                if option is not None:
                    option.cast_to_type(text)
            except IndexError:  # TorchX splits dictionaries at colons
                return f"Run option `{name}` is {text!r}, which is not of the form KEY:VALUE;KEY:VALUE"
            except (ValueError, TypeError):
                wanted = getattr(option.opt_type, "__name__", option.opt_type)
                return f"Run option `{name}` is {text!r}, which is no {wanted}"
        return f"-cfg {cfg_str!r}: {error}"
