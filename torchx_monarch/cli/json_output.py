# SPDX-License-Identifier: BSD-3-Clause
"""The option ``--json`` of the sub-commands; docs/reference/json.md has what each of them prints."""

from __future__ import annotations

import argparse
import json

_HELP = "print JSON instead of text, see docs/reference/json.md"


def add_json(parser: argparse.ArgumentParser) -> None:
    """Define ``--json``."""
    parser.add_argument("--json", action="store_true", help=_HELP)


def print_json(value: object) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=1))


def print_record(value: object) -> None:
    """Print a value as one line of a stream of JSON, at once."""
    print(json.dumps(value), flush=True)
