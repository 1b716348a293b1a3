# SPDX-License-Identifier: BSD-3-Clause
"""Read run options, of ``-cfg`` and of ``.torchxconfig``; an error names the option, its value and what is allowed."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torchx.specs import CfgVal, InvalidRunConfigException, runopts
from torchx.specs.api import runopt
from torchx.util.types import to_dict

from torchx_monarch.backends.core.torchx_api import put_option
from torchx_monarch.exceptions import TorchXMonarchError
from torchx_monarch.model.spelling import did_you_mean


def with_stored(cfg: dict[str, CfgVal], scheduler: str) -> dict[str, CfgVal]:
    """Add to run options those of ``.torchxconfig`` that they lack. TorchX's own function logs each file."""
    from torchx.runner import config  # slow to import

    for path in config.find_configs():
        with open(path) as file:
            config.load(scheduler, file, cfg)
    return cfg


class RunOptionError(TorchXMonarchError, InvalidRunConfigException):  # type: ignore[misc]
    """Raised for a wrong run option: TorchX's exception, for which ``torchx run -cfg`` shows a traceback, as ours."""


@dataclasses.dataclass
class _NamedOption(runopt):  # type: ignore[misc]
    """A run option whose parse error names it. TorchX's for ``grace=abc`` is only that of ``int``."""

    name: str = ""

    def cast_to_type(self, value: str) -> CfgVal:
        try:
            parsed: CfgVal = super().cast_to_type(value)
            return parsed
        except IndexError:  # TorchX splits dictionaries at colons
            wrong = "not of the form KEY:VALUE;KEY:VALUE"
        except (ValueError, TypeError):
            wrong = f"no {getattr(self.opt_type, '__name__', self.opt_type)}"
        reason = f"Run option `{self.name}` is {value!r}, which is {wrong}"
        raise RunOptionError(reason, self.name, {self.name: value})


class CheckedRunopts(runopts):  # type: ignore[misc]
    """Run options whose errors name the option that has a wrong value, and say what to type instead of an unknown one.

    Args:
        retired: what to use instead of options that there are no more, by their names.
    """

    def __init__(self, options: runopts, retired: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._retired = retired or {}
        for name, run_option in options:
            put_option(
                self,
                name,
                _NamedOption(run_option.default, run_option.opt_type, run_option.is_required, run_option.help, name),
            )

    def cfg_from_str(self, cfg_str: str) -> dict[str, CfgVal]:
        try:
            parsed: dict[str, CfgVal] = super().cfg_from_str(cfg_str)
            return parsed
        except InvalidRunConfigException as error:
            raise self._explained(error, to_dict(cfg_str)) from None
        except (ValueError, TypeError, IndexError) as error:
            hint = " (a value that contains = needs quotes: OPTION='A=B')" if cfg_str.count("=") > 1 else ""
            reason = f"-cfg {cfg_str!r} is not of the form OPTION=VALUE,OPTION=VALUE{hint}: {error}"
            raise RunOptionError(reason, cfg_str, {}) from None

    def resolve(self, cfg: Mapping[str, CfgVal], *, ignore_unknown: bool = False) -> dict[str, CfgVal]:
        try:
            resolved: dict[str, CfgVal] = super().resolve(cfg, ignore_unknown=ignore_unknown)
            return resolved
        except InvalidRunConfigException as error:
            raise self._explained(error, cfg) from None

    def _explained(self, error: InvalidRunConfigException, cfg: Mapping[str, CfgVal]) -> RunOptionError:
        """Return our exception for one of TorchX's, with what to type instead of an option that does not exist."""
        name, names = error.cfg_key, [name for name, _ in self]
        if name in self._retired:
            reason = f"There is no run option `{name}` any more: {self._retired[name]}"
        elif name not in names and (hint := did_you_mean(name, names)):
            reason = f"Unknown run option `{name}`.{hint} Valid options are: {', '.join(sorted(names))}"
        else:
            reason = str(error).partition(". Given: ")[0]
        return RunOptionError(reason, name, cfg)
