# SPDX-License-Identifier: BSD-3-Clause
"""Set values in the text of a ``.torchxconfig`` and leave everything else in it as it is, such as comments."""

from __future__ import annotations

import configparser
import io
import re


class ConfigSyntaxError(ValueError):
    """The text is not what TorchX can read; the message names the line."""


def value_of(text: str, section: str, key: str) -> str | None:
    """Return the value of a key; None if the text does not set it.

    Raises:
        ConfigSyntaxError: TorchX cannot read the text.
    """
    parser = configparser.RawConfigParser(default_section="")  # [DEFAULT] is a section like any other here
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # TorchX tells upper case from lower case, too
    try:
        parser.read_string(text, source=".torchxconfig")
    except configparser.Error as error:
        raise ConfigSyntaxError(" ".join(str(error).split())) from None
    return parser.get(section, key, fallback=None)


def with_value(text: str, section: str, key: str, value: str) -> str:
    """Return the text with a key set to a value, in a section that is added at the end if there is none.

    Raises:
        ConfigSyntaxError: TorchX cannot read the text, or the place of the value cannot be told.
    """
    before = value_of(text, section, key)
    if before == value:
        return text
    changed = _with_value(text, section, key, value, before is not None)
    if value_of(changed, section, key) != value:
        raise ConfigSyntaxError(f"write `{key} = {value}` into its section [{section}] yourself")
    return changed


def _with_value(text: str, section: str, key: str, value: str, is_set: bool) -> str:
    line_end = "\r\n" if "\r\n" in text else "\n"
    setting = f"{key} = {value}{line_end}"
    lines = list(io.StringIO(text))  # as configparser has them
    header = next((number for number, line in enumerate(lines) if _is_header(line, section)), None)
    if header is None:
        before = f"{text.rstrip()}{line_end}{line_end}" if text.strip() else ""
        return f"{before}[{section}]{line_end}{setting}"
    if not lines[-1].endswith("\n"):
        lines[-1] += line_end
    if not is_set:
        return "".join([*lines[: header + 1], setting, *lines[header + 1 :]])
    start = next((number for number in range(header + 1, len(lines)) if _is_setting(lines[number], key)), header)
    end = start + 1
    while end < len(lines) and lines[end][:1].isspace() and lines[end].strip():  # a value of several lines
        end += 1
    return "".join([*lines[:start], setting, *lines[end:]])


def _is_header(line: str, section: str) -> bool:
    found = configparser.RawConfigParser.SECTCRE.match(line.strip())
    return found is not None and found["header"] == section


def _is_setting(line: str, key: str) -> bool:
    return re.match(rf"\s*{re.escape(key)}\s*[=:]", line) is not None
