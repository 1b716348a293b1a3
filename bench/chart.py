# SPDX-License-Identifier: BSD-3-Clause
"""Put what bench/launch.py has measured into the documentation: ``python bench/chart.py``.

From bench/recorded/launch.json it draws launch.svg (seconds), launch_cpu.svg (seconds of processor time) and memory.svg
(MB) of docs/pictures, and writes the table of docs/explanation/benchmarks.md. A test does the same and compares. For
new numbers run ``make bench BENCHFLAGS="--json bench/recorded/launch.json"`` first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "bench" / "recorded" / "launch.json"
PICTURES = ROOT / "docs" / "pictures"
PAGE = ROOT / "docs" / "explanation" / "benchmarks.md"

_TITLES = {
    "torchrun": "torchrun",
    "torchx": "torchx run -s local_cwd",
    "monarch": "Monarch's serve, run_spmd",
    "hand": "ranks started by hand",
    "ours-cli": "torchx run -s monarch_local",
}
"""The variants that are drawn, from the top down; the last one is ours."""

_ROWS = {
    "hand": "ranks started by hand",
    "torchrun": "`torchrun --standalone`",
    "torchx": "`torchx run -s local_cwd dist.torchrun`",
    "monarch": "Monarch's `serve` + `run_spmd`",
    "ours": "**`monarch_local`** through a Runner",
    "ours-cli": "**`torchx run -s monarch_local --wait`**",
}
"""The rows of the table."""

_TABLE = re.compile(r"(<!-- launch: begin -->\n).*?(\n<!-- launch: end -->)", re.DOTALL)

_WIDTH, _LABEL, _ROW, _TOP, _GAP = 760, 232, 22, 56, 34

# A card of its own colours: readable on a light page and on a dark one, whatever the page has been switched to.
_STYLE = """
text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #24292f; }
.title { font-size: 15px; font-weight: 600; }
.note, .group { fill: #57606a; font-size: 12px; }
.card { fill: #ffffff; stroke: #d0d7de; }
.peer { fill: #afb8c1; }
.ours { fill: #e8590c; }
.mine { font-weight: 600; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .note, .group { fill: #9198a1; }
  .card { fill: #15191f; stroke: #3d444d; }
  .peer { fill: #59636e; }
  .ours { fill: #ff8c42; }
}
"""


@dataclass(frozen=True)
class Bar:
    """One bar: its label, its length, and whether it is ours."""

    label: str
    value: float
    ours: bool


@dataclass(frozen=True)
class Group:
    """Bars below one heading."""

    heading: str
    bars: Sequence[Bar]


def draw(title: str, note: str, groups: Sequence[Group], unit: str, digits: int) -> str:
    """Return a bar chart as SVG.

    Args:
        title: heading of the chart.
        note: how and where the values were measured, in one line.
        groups: the bars; all have one scale.
        unit: unit of the values, written behind each.
        digits: digits behind the point.
    """
    longest = max(bar.value for group in groups for bar in group.bars)
    room = _WIDTH - _LABEL - 96
    height = _TOP + sum(_GAP + _ROW * len(group.bars) for group in groups) + 16
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f'<rect class="card" x=".5" y=".5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
        f'<text class="title" x="20" y="30">{escape(title)}</text>',
        f'<text class="note" x="20" y="49">{escape(note)}</text>',
    ]
    y = _TOP
    for group in groups:
        out.append(f'<text class="group" x="20" y="{y + 24}">{escape(group.heading)}</text>')
        y += _GAP
        for bar in group.bars:
            length = round(room * bar.value / longest, 1)
            kind, weight = ("ours", ' class="mine"') if bar.ours else ("peer", "")
            out.append(f'<text{weight} x="{_LABEL - 10}" y="{y + 15}" text-anchor="end">{escape(bar.label)}</text>')
            out.append(f'<rect class="{kind}" x="{_LABEL}" y="{y + 3}" width="{length}" height="{_ROW - 6}" rx="2"/>')
            value = f"{bar.value:.{digits}f} {unit}"
            out.append(f'<text{weight} x="{_LABEL + length + 8}" y="{y + 15}">{escape(value)}</text>')
            y += _ROW
    return "\n".join([*out, "</svg>"]) + "\n"


def pictures(measured: dict[str, Any]) -> dict[str, str]:
    """Return the charts of a measurement by the names of their files."""
    machine, rounds = measured["machine"], measured["rounds"]
    torch = machine["versions"]["torch"].partition("+")[0]
    where = f"{machine['cpus']} cores, torch {torch} (CPU), Python {machine['python']}"
    launches = measured["launches"]

    def groups(column: str) -> list[Group]:
        return [
            Group(
                f"{nproc} ranks",
                [
                    Bar(title, launch["summary"][name][column]["median"], name == "ours-cli")
                    for name, title in _TITLES.items()
                ],
            )
            for nproc, launch in launches.items()
        ]

    memory = [
        Group(
            f"{nproc} ranks",
            [
                Bar(label, measurement["pss"] + measurement["ranks_pss"], measurement["variant"] == "ours")
                for label, variant in (("torchrun", "torchrun"), ("monarch_local", "ours"))
                for measurement in measured["idle"]
                if measurement["nproc"] == nproc and measurement["variant"] == variant
            ],
        )
        for nproc in sorted({measurement["nproc"] for measurement in measured["idle"]})
    ]
    how = f"import torch, one Gloo group, one all-reduce, exit; medians of {rounds} rounds; {where}"
    return {
        "launch.svg": draw("Seconds from the command to the end of its last process", how, groups("total"), "s", 1),
        "launch_cpu.svg": draw("Processor time of a launch, all processes", how, groups("cpu"), "s", 1),
        "memory.svg": draw("Memory (PSS) of the ranks and all else of a job, sleeping", where, memory, "MB", 0),
    }


def table(measured: dict[str, Any]) -> str:
    """Return the table of launches in Markdown."""
    launches = measured["launches"]
    lines = ["".join(f"| {cell} " for cell in ["", *(f"{nproc} ranks" for nproc in launches)]) + "|"]
    lines.append("|" + "---|" * (len(launches) + 1))
    for name, title in _ROWS.items():
        of = [launch["summary"][name] for launch in launches.values()]
        totals = ["{median:.2f} ({min:.2f}–{max:.2f})".format(**launch["total"]) for launch in of]
        ratios = [f"{launch['x_torchrun']['median']:.2f}x" for launch in of]
        cells = [title, *(f"{total}, {ratio}" for total, ratio in zip(totals, ratios, strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str, measured: dict[str, Any]) -> str:
    """Return the page of benchmarks with the table of a measurement."""
    return _TABLE.sub(lambda match: match[1] + table(measured) + match[2], text)


def main() -> None:
    measured = json.loads(MEASURED.read_text())
    for name, picture in pictures(measured).items():
        (PICTURES / name).write_text(picture)
    PAGE.write_text(page(PAGE.read_text(), measured))


if __name__ == "__main__":
    main()
