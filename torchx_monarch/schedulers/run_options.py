# SPDX-License-Identifier: BSD-3-Clause
"""Read run options, of ``-cfg`` and of ``.torchxconfig``; an error names the option, its value and what is allowed."""

from __future__ import annotations

import dataclasses

from torchx.specs import CfgVal, InvalidRunConfigException, runopts
from torchx.specs.api import runopt
from torchx.util.types import to_dict

from torchx_monarch.backends.core.torchx_api import put_option
from torchx_monarch.model.spelling import did_you_mean


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
        raise InvalidRunConfigException(reason, self.name, {self.name: value})


class CheckedRunopts(runopts):  # type: ignore[misc]
    """Run options whose errors name the option that has a wrong value."""

    def __init__(self, options: runopts) -> None:
        super().__init__()
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
            names = [name for name, _ in self]
            hint = did_you_mean(error.cfg_key, names)
            if error.cfg_key in names or not hint:
                raise
            reason = f"Unknown run option `{error.cfg_key}`.{hint} Valid options are: {', '.join(sorted(names))}"
            raise InvalidRunConfigException(reason, error.cfg_key, to_dict(cfg_str)) from None
        except (ValueError, TypeError, IndexError) as error:
            hint = " (a value that contains = needs quotes: OPTION='A=B')" if cfg_str.count("=") > 1 else ""
            reason = f"-cfg {cfg_str!r} is not of the form OPTION=VALUE,OPTION=VALUE{hint}: {error}"
            raise InvalidRunConfigException(reason, cfg_str, {}) from None
