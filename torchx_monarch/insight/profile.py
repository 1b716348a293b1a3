# SPDX-License-Identifier: BSD-3-Clause
"""Profiles of ranks: parse what py-spy has sampled, and write it as a flame graph, for speedscope, or as text.

A rank chooses the names of its functions and files, so they are limited in number and size, and escaped.
"""

from __future__ import annotations

import colorsys
import dataclasses
import html
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torchx_monarch.system.untrusted_text import one_line

MAX_SECONDS = 600.0
"""Longest profile in seconds."""

_MAX_FRAMES = 200
"""Frames of one stack, from the outermost on, that are shown."""

_MAX_NAME = 300
"""Characters of a frame that are shown."""


@dataclasses.dataclass(frozen=True)
class RankProfile:
    """What the threads of a rank did while it was sampled.

    Attributes:
        samples: how often each stack was found: frames in the form ``function (file:line)``, the outermost first, with
            semicolons between them.
        problem: why there are no samples, or not those of the whole time; empty if there are.
    """

    rank: int
    replica: int
    pid: int
    samples: Mapping[str, int] = dataclasses.field(default_factory=dict)
    problem: str = ""


def parse_collapsed(text: str, limit: int, own_files: Iterable[str] = ()) -> dict[str, int]:
    """Parse the output of ``py-spy record --format raw``; return the samples of a ``RankProfile``, frequent ones first.

    Args:
        limit: bytes of the result as JSON; the rarest stacks above it are dropped.
        own_files: files whose frames are left out where they are outside all others, with what is outside of them.
    """
    files, samples = tuple(f" ({file}:" for file in own_files), Counter[str]()
    for line in text.split("\n"):
        stack, _, count = line.rpartition(" ")
        if not (stack and count.isdecimal() and len(count) < 10):
            continue
        frames = stack.split(";")
        own = [at for at, frame in enumerate(frames) if any(file in frame for file in files)]
        frames = frames[own[-1] + 1 :] if own else frames
        samples[";".join(one_line(frame, _MAX_NAME) for frame in frames[:_MAX_FRAMES]) or "(no function)"] += int(count)
    found = dict[str, int]()
    for stack, number in samples.most_common():
        limit -= len(json.dumps(stack)) + len(str(number)) + 2
        if limit >= 0:
            found[stack] = number
    return found


def collapsed(profiles: Sequence[RankProfile]) -> str:
    """Return the stacks as text, a line each with its number of samples: the form of Brendan Gregg's tools."""
    return "".join(f"{';'.join(stack)} {count}\n" for stack, count in _stacks(profiles))


def _stacks(profiles: Sequence[RankProfile]) -> list[tuple[tuple[str, ...], int]]:
    """Return the stacks of all profiles; the outermost frame is the rank if there are several."""
    return [
        ((*((f"rank {profile.rank}",) if len(profiles) > 1 else ()), *stack.split(";")), count)
        for profile in profiles
        for stack, count in profile.samples.items()
    ]


def speedscope(profiles: Sequence[RankProfile]) -> str:
    """Return a file for https://www.speedscope.app with a profile for each rank."""
    index: dict[str, int] = {}
    shown = [
        {
            "type": "sampled",
            "name": f"rank {profile.rank}",
            "unit": "none",
            "startValue": 0,
            "endValue": sum(profile.samples.values()),
            "samples": [[index.setdefault(name, len(index)) for name in stack.split(";")] for stack in profile.samples],
            "weights": [*profile.samples.values()],
        }
        for profile in profiles
    ]
    schema = "https://www.speedscope.app/file-format-schema.json"
    return json.dumps({"$schema": schema, "shared": {"frames": [{"name": name} for name in index]}, "profiles": shown})


# -- the flame graph ---------------------------------------------------------------------------------------------------

_WIDTH, _ROW, _CHARACTER = 1200, 17, 6.6
"""Pixels: of the graph, of a frame, of a character of 11 pixels in a monospaced font."""

_MIN_WIDTH = 0.5
"""Pixels; narrower frames, and those inside them, are left out."""


@dataclasses.dataclass
class _Frame:
    name: str
    count: int = 0
    inner: dict[str, _Frame] = dataclasses.field(default_factory=dict)


def flame_graph(profiles: Sequence[RankProfile], title: str) -> str:
    """Return a flame graph in SVG: the outermost frames on top; it executes nothing, and loads nothing."""
    root = _Frame("all")
    for stack, count in _stacks(profiles):
        frame = root
        frame.count += count
        for name in stack:
            frame = frame.inner.setdefault(name, _Frame(name))
            frame.count += count
    rows, deepest = list[str](), 0
    left: list[tuple[_Frame, float, int]] = [(root, 0.0, 0)]
    while left:
        frame, x, depth = left.pop()
        width = _WIDTH * frame.count / max(1, root.count)
        if width < _MIN_WIDTH:
            continue
        deepest = max(deepest, depth)
        rows.append(_rectangle(frame, x, width, depth, root.count))
        for inner in sorted(frame.inner.values(), key=lambda inner: -inner.count):
            left.append((inner, x, depth + 1))
            x += _WIDTH * inner.count / root.count
    height = (deepest + 3) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" preserveAspectRatio="xMinYMin" '
        f'font-family="monospace" font-size="11">\n<rect width="{_WIDTH}" height="{height}" fill="#fff"/>\n'
        f'<text x="4" y="{_ROW - 4}">{html.escape(one_line(title))}</text>\n{"".join(rows)}</svg>\n'
    )


def _rectangle(frame: _Frame, x: float, width: float, depth: int, total: int) -> str:
    function, _, place = frame.name.partition(" (")
    label = f"{function} ({place.rpartition('/')[2]}" if place else function
    room = int((width - 6) / _CHARACTER)
    shown = label if len(label) <= room else f"{label[: room - 2]}.." if room > 4 else ""
    hue = zlib.crc32((place.rpartition(":")[0] or function).encode(errors="replace")) % 360 / 360
    color = "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, 0.8, 0.6))
    y = (depth + 1.5) * _ROW
    percent = f"{100 * frame.count / total:.1f} %, {frame.count} samples"
    return (
        f'<g><title>{html.escape(frame.name)}: {percent}</title><rect x="{x:.1f}" y="{y:.1f}" '
        f'width="{max(width - 0.5, 0.3):.1f}" height="{_ROW - 1}" fill="#{color}"/>'
        f'<text x="{x + 3:.1f}" y="{y + _ROW - 5:.1f}">{html.escape(shown)}</text></g>\n'
    )
