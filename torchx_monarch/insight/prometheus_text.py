# SPDX-License-Identifier: BSD-3-Clause
"""Prometheus' text format, as scrapers and node_exporter's textfile collector read it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from torchx_monarch.system.untrusted_text import one_line


@dataclasses.dataclass
class Family:
    """The values of one metric.

    Attributes:
        name: its name, which ends in its unit, and in ``_total`` if it is a counter.
        help: what it means, in one line.
        values: labels and value of each; values with equal labels would make the text invalid.
    """

    name: str
    help: str
    values: list[tuple[Mapping[str, str], float]] = dataclasses.field(default_factory=list)

    def add(self, labels: Mapping[str, str], value: float | None) -> None:
        """Add a value; none if it is None. Labels that are empty are left out, which means the same to Prometheus."""
        if value is not None:
            self.values.append(({name: text for name, text in labels.items() if text}, value))

    @property
    def type(self) -> str:
        """``counter`` or ``gauge``, as the name tells."""
        return "counter" if self.name.endswith("_total") else "gauge"

    def to_json(self) -> dict[str, object]:
        """Return the metric as JSON values."""
        values = [{"labels": dict(labels), "value": value} for labels, value in self.values]
        return {"name": self.name, "help": self.help, "type": self.type, "values": values}


def render(families: Iterable[Family]) -> str:
    """Return the metrics as text; a metric without a value is left out."""
    lines: list[str] = []
    for family in families:
        if family.values:
            lines += [f"# HELP {family.name} {_escape(family.help)}", f"# TYPE {family.name} {family.type}"]
            lines += [f"{family.name}{_labels(labels)} {_number(value)}" for labels, value in family.values]
    return "".join(f"{line}\n" for line in lines)


def _labels(labels: Mapping[str, str]) -> str:
    shown = ",".join(f'{name}="{_escape(_printable(text), quoted=True)}"' for name, text in labels.items())
    return f"{{{shown}}}" if shown else ""


def _printable(text: str) -> str:
    return "\n".join(map(one_line, text.split("\n")))  # the format has an escape for a line feed, and none for others


def _escape(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
