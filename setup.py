# Copyright (c) the torchx-monarch authors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one thing that setup.cfg cannot say: the order of the schedulers' entry points. All else is there.

TorchX's default scheduler is the first one that is registered, in the order of entry_points.txt, which setuptools sorts
by name: with ``aws_batch`` among ours, ``torchx run`` without ``-s`` would submit to AWS.
"""

from pathlib import Path

from setuptools import setup
from setuptools.command.egg_info import egg_info

FIRST = "local_docker = "
GROUP = "[torchx.schedulers]\n"


class InOrder(egg_info):
    """Writes the file as setuptools does, and puts TorchX's own default first again."""

    def run(self) -> None:
        super().run()
        path = Path(self.egg_info, "entry_points.txt")
        lines = path.read_text().splitlines(keepends=True)
        (first,) = (line for line in lines if line.startswith(FIRST))
        lines.remove(first)
        lines.insert(lines.index(GROUP) + 1, first)
        path.write_text("".join(lines))


setup(cmdclass={"egg_info": InOrder})
