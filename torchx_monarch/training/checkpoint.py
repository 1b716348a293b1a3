# SPDX-License-Identifier: BSD-3-Clause
"""In the program of a rank: ``torchx_monarch.checkpoint`` and ``torchx_monarch.last_checkpoint``.

Our hosts give their ranks a folder in memory, ``MEMORY``. The ranks of a host write a checkpoint in its
``writing_STEP/step_STEP``, and each leaves a file ``rank_RANK`` (a ``Written``) beside it when it is done, which it
tells the host with a datagram to the socket ``ready``. The rest is up to the host (``host.checkpoints``). ``last`` is a
link to the checkpoint with which the present attempt begins. A checkpoint goes to ``disk``, a link, if the memory has
no room for as many bytes as the last one of this host had, which ``size`` says, or if there is a file ``full``.

Without our hosts, such as under torchrun, ranks write checkpoints into the folder of the user alone (``saved``).
Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import json
import operator
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

from torchx_monarch.insight import step_progress
from torchx_monarch.system.cgroups import read_number, room_in
from torchx_monarch.training import saved, steps

MEMORY = "MONARCH_CHECKPOINTS"
"""The variable with the folder in which a host keeps the checkpoints of its ranks."""

WRITING = "writing_"

_LITTLE = 1 << 20
"""Bytes: a file system with less is full. What writes the files of a checkpoint may not say why it has failed."""


_last_step = 0
"""The step of the last checkpoint in memory that this process has begun."""


@dataclasses.dataclass(frozen=True)
class Written:
    """What a rank says of a checkpoint of which it has written its files.

    Attributes:
        ranks: the ranks that take part; empty for all.
        persist: absolute path of the folder into which the host copies it now and then; empty for none.
        shared: whether ranks may read files that ranks of other hosts have written.
    """

    ranks: tuple[int, ...]
    persist: str
    persist_every: float
    shared: bool


@contextlib.contextmanager
def checkpoint(
    step: int,
    persist: str | os.PathLike[str] | None = None,
    *,
    persist_every: float = 600.0,
    ranks: Collection[int] | None = None,
    shared: bool = True,
) -> Iterator[Path]:
    """Save a checkpoint: the program writes its files into the folder that the ``with`` statement gives it.

    Files are in the memory of the hosts, which outlive their ranks. A checkpoint counts when all ranks that take part
    have left their blocks without an exception; until then, the one before counts. Leaving the block waits for nobody.
    Ranks may share the folder, so give files names of their own, as ``f"rank_{rank}.pt"``. Close all files in the
    block.

    Under torchrun, or by hand, each checkpoint goes into ``persist``, and nowhere if that is None.

    Args:
        step: the step that the program has finished; 0 or more.
        persist: a folder that all hosts share, into which the hosts copy a whole checkpoint now and then and at the end
            of the job, as ``step_N``. The last two stay. None for memory alone.
        persist_every: seconds between two such copies; the first checkpoint is copied at once.
        ranks: the ranks that take part, if not all do: with ``[0]``, rank 0 alone calls this.
        shared: whether a rank may read, after a restart, what ranks of other hosts have written, as DCP does. If each
            rank reads its own files alone, False saves the hosts the exchange.

    Raises:
        ValueError: the step is negative or less than that of the checkpoint before, ``persist_every`` is not positive,
            or this rank is not one of ``ranks``.
        OSError: the folder cannot be made.
    """
    global _last_step
    step, rank = operator.index(step), int(os.environ.get("RANK", "0"))
    if not 0 <= step < step_progress.MAX_STEP:
        raise ValueError(f"step is {step}: give 0 or more, and less than 2**53")
    if not persist_every > 0:
        raise ValueError(f"persist_every is {persist_every}: give a number of seconds above 0")
    if ranks is not None and rank not in ranks:
        raise ValueError(f"rank {rank} is not one of ranks={sorted(ranks)}: only these call checkpoint")
    written = Written(
        ranks=tuple(sorted(ranks or ())),
        persist=os.path.abspath(persist) if persist else "",
        persist_every=min(float(persist_every), sys.float_info.max),  # JSON has no infinity
        shared=bool(shared),
    )
    if memory := os.environ.get(MEMORY):
        if step < _last_step:
            raise ValueError(
                f"step is {step}, after {_last_step}: the highest counts, so do not count anew in each epoch"
            )
        _last_step = step
        with _in_memory(Path(memory), step, rank, written) as folder:
            yield folder
    elif persist:
        with _on_disk(Path(written.persist), step, rank, written) as folder:
            yield folder
        _count(step)
    else:
        with tempfile.TemporaryDirectory() as nowhere:
            yield Path(nowhere)


def last_checkpoint(persist: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the folder of the newest whole checkpoint, whose name is ``step_N``; None if there is none.

    In memory that is the one from which the present attempt goes on, the same for all its ranks; it has the files of
    all ranks, also if the number of ranks has changed. Without one it is that of ``persist``. Call this in all ranks
    before the first ``checkpoint``.

    Args:
        persist: the folder that ``checkpoint`` gets; None for memory alone.
    """
    if memory := os.environ.get(MEMORY):
        with contextlib.suppress(OSError):
            return Path(os.path.realpath(os.path.join(memory, "last"), strict=True))
    if not persist:
        return None
    folder = Path(os.path.abspath(persist))
    if not memory:
        _begin(folder, os.environ.get("RANK", "0"), _token())
    found, damaged = saved.newest(folder)
    for why in damaged:
        _say(f"the checkpoint {why}: {f'taking {found}' if found else 'and there is no other'}")
    return found


# -- in memory ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _in_memory(memory: Path, step: int, rank: int, written: Written) -> Iterator[Path]:
    place = memory / f"{WRITING}{step}"
    folder = _make(memory, place) / saved.step_name(step)
    folder.mkdir(exist_ok=True)
    aside = place / f".rank_{rank}"
    try:
        yield folder
        aside.write_text(json.dumps(dataclasses.asdict(written)))
        os.replace(aside, place / f"rank_{rank}")
    except BaseException as error:
        if not isinstance(error, Exception) or not _gave_up(memory, place, error):
            raise
        _say(f"rank {rank}: no room for the checkpoint of step {step} in {folder}; the one before stays, and the next")
        return
    _tell(memory)
    _count(step)


def _make(memory: Path, place: Path) -> Path:
    """Make the folder of a step, in memory or on disk, or find that which another rank of this host has made."""
    disk = memory / "disk"
    try:
        if (memory / "full").exists() or read_number(memory / "size") > room_in(memory):
            (there := Path(os.readlink(disk)) / place.name).mkdir(parents=True, exist_ok=True)
            place.symlink_to(there)
        else:
            place.mkdir()
    except FileExistsError:
        pass
    return place


def _gave_up(memory: Path, place: Path, error: Exception) -> bool:
    """Return whether the memory is full, which costs this checkpoint alone; have the next go to the disk then."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
        cause = cause.__cause__ or cause.__context__
    if place.exists():
        found = os.statvfs(place)
        if cause is None and found.f_bavail * found.f_frsize > _LITTLE:
            return False
        (memory / "full").touch()
        with contextlib.suppress(OSError):
            os.rename(place, aside := f"{place}.{os.getpid()}")
            shutil.rmtree(os.path.realpath(aside), ignore_errors=True)
        return True
    return (memory / "full").exists()  # another rank has given it up


def _tell(memory: Path) -> None:
    kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
    # An error: the host has datagrams enough to look, or has ended.
    with socket.socket(socket.AF_UNIX, kind) as sending, contextlib.suppress(OSError):
        sending.sendto(b"x", str(memory / "ready"))


# -- without our hosts -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _on_disk(persist: Path, step: int, rank: int, written: Written) -> Iterator[Path]:
    aside = saved.part_folder(persist, step, _token())
    done = aside / f"rank_{rank}"
    folder = aside / saved.step_name(step)
    folder.mkdir(parents=True, exist_ok=True)
    done.unlink(missing_ok=True)
    yield folder
    done.touch()
    for other in written.ranks or range(int(os.environ.get("WORLD_SIZE", "1"))):
        if not (aside / f"rank_{other}").exists():
            return
    with contextlib.suppress(FileNotFoundError, FileExistsError):  # another rank has come at the same moment
        (aside / "publishing").mkdir()
        saved.publish(persist, step, _token(), {"a rank": saved.sizes(folder)})


def _count(step: int) -> None:
    step_progress.set_checkpoint(step)
    steps.checkpointed(step)


def _token() -> str:
    """Return a word that the ranks of one start share, and those of another one do not."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    values = [os.environ.get(name, "") for name in (*names, "SLURM_JOB_ID", "SLURM_RESTART_COUNT")]
    return hashlib.sha256("\n".join(values).encode()).hexdigest()[:12]


@functools.cache
def _begin(persist: Path, rank: str, token: str) -> None:
    """Remove what this rank, or an earlier start, has not finished, before this start saves anything."""
    if rank == "0":
        saved.remove_parts(persist, token)
    for done in persist.glob(f".step_*.{token}.part/rank_{rank}"):
        done.unlink(missing_ok=True)


def _say(text: str) -> None:
    print(f"[torchx_monarch] {text}", file=sys.stderr, flush=True)
