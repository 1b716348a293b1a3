# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""Set the order of the schedulers' entry points, which setup.cfg cannot; all other metadata is in setup.cfg.

TorchX's default scheduler is the first one in entry_points.txt, which setuptools sorts by name. Since this package
registers ``aws_batch``, ``torchx run`` without ``-s`` would otherwise submit to AWS.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.egg_info import egg_info

FIRST = "local_docker = "
GROUP = "[torchx.schedulers]\n"


class InOrder(egg_info):
    """Writes entry_points.txt like setuptools, then moves TorchX's own default scheduler to the first place."""

    def run(self) -> None:
        super().run()
        path = Path(self.egg_info, "entry_points.txt")
        lines = path.read_text().splitlines(keepends=True)
        (first,) = (line for line in lines if line.startswith(FIRST))
        lines.remove(first)
        lines.insert(lines.index(GROUP) + 1, first)
        path.write_text("".join(lines))


setup(cmdclass={"egg_info": InOrder})
