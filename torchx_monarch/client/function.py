# SPDX-License-Identifier: BSD-3-Clause
"""Run a function on all ranks, and return what each of them returned (``torchx_monarch.function`` is their part)."""

from __future__ import annotations

import base64
import dataclasses
import inspect
import io
import json
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from torchx_monarch.client.run_options import RunOptions, merge_options
from torchx_monarch.client.serve import command_app, submit
from torchx_monarch.client.workspace_sync import current_workspace
from torchx_monarch.exceptions import ResultError, SPMDError
from torchx_monarch.function import MAX_CALL_BYTES, MODULE, Encoding
from torchx_monarch.model.spelling import did_you_mean
from torchx_monarch.system.untrusted_text import one_line

if TYPE_CHECKING:
    from torchx.runner import Runner

    from torchx_monarch.client.result import RunResult

T = TypeVar("T")

_IDLE_TIMEOUT = 120.0
"""Seconds after which hosts end whose client is gone."""


def run(
    function: Callable[..., T],
    /,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    scheduler: str = "monarch_local",
    scheduler_cfg: Mapping[str, Any] | None = None,
    nnodes: int = 1,
    nproc: int | str = 1,
    max_restarts: int = 0,
    options: RunOptions | None = None,
    start_timeout: float | None = None,
    runner: Runner | None = None,
    **others: object,
) -> list[T]:
    """Take hosts, call a function in each rank on them, release the hosts, and return what each rank returned::

        losses = torchx_monarch.run(train, 0.1, kwargs={"epochs": 3}, scheduler="monarch_slurm", nnodes=2, nproc=8)

    Each rank is a process with the environment of ``torchrun``, in which ``torch.distributed.init_process_group()``
    works. ``SPMDJob.run`` does the same on hosts that stay.

    Args:
        function: the function. Those of ``__main__`` and notebooks travel by value; any other is imported by the ranks,
            from the current folder (``RunOptions.workspace``) or an installed package.
        *args: its arguments, for all ranks alike.
        kwargs: its keyword arguments.
        scheduler: name of a ``monarch_*`` scheduler.
        scheduler_cfg: run options of the scheduler; None for its defaults.
        nnodes: number of hosts.
        nproc: ranks per host: a number, ``auto``, ``gpu``, ``cpu`` or ``xpu``.
        max_restarts: how often all ranks start again after a failure.
        options: options of the run; None for the defaults of ``RunOptions``. ``results="json"`` unpickles nothing here.
        start_timeout: seconds to wait for the hosts; None for no limit.
        runner: the TorchX runner; None to create one.
        **others: none, so that a misspelt option is not an argument of the function: these are in ``kwargs``.

    Returns:
        What each rank returned, by rank.

    Raises:
        Exception: what the function raised in the rank that is the root cause, with its type. Its ``__cause__`` is the
            ``SPMDError`` that has the rank and its traceback.
        SPMDError: the run failed without such an exception.
        ResultError: the function returned, but a value could not be brought here.
        TypeError: the function cannot be called so, it or an argument cannot be pickled, or an option is unknown.
        ValueError: these are too large, or an argument of ``serve`` has an invalid value.
        KeyboardInterrupt: the user pressed Ctrl-C; the hosts are released.
    """
    for name in others:
        names = ["kwargs", "scheduler", "scheduler_cfg", "nnodes", "nproc", "max_restarts", "options", "start_timeout"]
        hint = did_you_mean(name, names) or f" For an argument of {_name(function)}: kwargs={{{name!r}: ...}}"
        raise TypeError(f"run has no option {name}.{hint}")
    options = merge_options(options, {})
    encode_call(function, args, kwargs or {}, options)  # bad arguments are reported before hosts are taken
    words = ["--nnodes", str(nnodes), "--nproc-per-node", str(nproc), "--max-restarts", str(max_restarts)]
    app = command_app(["torchrun", *words, "-m", MODULE, _name(function)])
    from torchx_monarch.client.job import SPMDJob  # imports Monarch

    handle, runner = submit(app, scheduler, scheduler_cfg, idle_timeout=_IDLE_TIMEOUT, runner=runner)
    job = SPMDJob(handle, runner=runner, workspace=current_workspace(), start_timeout=start_timeout)
    try:
        values = job.run(function, *args, options=options, **(kwargs or {}))
    except BaseException:
        job.kill()
        raise
    job.release()
    return values


def program(function: Callable[..., object]) -> list[str]:
    """Return the words of the program that calls a function; the host adds the path of the file with it."""
    return ["-m", MODULE, _name(function)]


def encode_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], options: RunOptions
) -> str:
    """Return a function with its arguments as base64 of a pickle, for ``RunRequest.function``.

    Raises:
        TypeError: ``function`` is none, does not take the arguments, or something cannot be pickled.
        ValueError: the pickle is too large.
    """
    import cloudpickle

    if not callable(function):
        raise TypeError(f"function={function!r:.200} cannot be called: give a function and, after it, its arguments")
    _check_arguments(function, args, kwargs)
    if "__mp_main__" in sys.modules:  # what a child that multiprocessing has spawned calls its __main__
        cloudpickle.register_pickle_by_value(sys.modules["__mp_main__"])
    try:
        call = _pickle(function, tuple(args), dict(kwargs), options.results, sys.argv[:1])
    except Exception as error:  # whatever a method of an argument raises
        raise TypeError(_unpicklable(function, args, kwargs, error)) from error
    data = pickle.dumps((sys.version_info[:2], _script_folder(options.workspace), call))
    if len(data) > MAX_CALL_BYTES:
        raise ValueError(
            f"{_name(function)} and its arguments are {len(data) / (1 << 20):.1f} MiB as a pickle; the limit is "
            f"{MAX_CALL_BYTES >> 20} MiB. Pass the path of a file instead of the data"
        )
    return base64.b64encode(data).decode()


def _pickle(*call: object) -> bytes:
    """Pickle these values, and after them the functions and classes of ``__main__`` among them, by their names."""
    import cloudpickle

    names = dict[str, object]()

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, (type, types.FunctionType)) and value.__module__ in ("__main__", "__mp_main__"):
                module, name = sys.modules[value.__module__], value.__name__
                if getattr(module, name, None) is value:
                    names[name] = value
            return super().reducer_override(value)

    file = io.BytesIO()
    Pickler(file).dump((*call, names))
    return file.getvalue()


def _check_arguments(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in function has none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        fields = [field.name for field in dataclasses.fields(RunOptions) if field.name in kwargs]
        hint = f". An option of the run: options=RunOptions({fields[0]}=...)" if fields else ""
        raise TypeError(f"{_name(function)}{signature}: {error}{hint}") from None


def _unpicklable(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object], error: Exception
) -> str:
    """Describe what of a call cannot be pickled: the first part that fails alone."""
    import cloudpickle

    for name, value in [*enumerate(args), *kwargs.items()]:
        try:
            cloudpickle.dumps(value)
        except Exception:
            return f"argument {name} of {_name(function)}, a {type(value).__name__}, cannot be pickled: {error}"
    return f"{_name(function)} cannot be pickled, with the values that it uses from outside: {error}"


def _script_folder(workspace: str | None) -> str:
    """Return the folder, relative to the workspace, from which the script of this process imports its modules.

    Empty if it is the workspace, from which ranks import anyway, or not in it.
    """
    if not workspace:
        return ""
    folder = os.path.relpath(os.path.realpath(sys.path[0]), os.path.realpath(os.path.expanduser(workspace)))
    return "" if folder == os.curdir or folder.split(os.sep)[0] == os.pardir else folder


def _name(function: Callable[..., object]) -> str:
    named = getattr(function, "func", function)  # functools.partial
    return str(getattr(named, "__name__", type(named).__name__))


def decode_values(result: RunResult, values: Mapping[int, bytes | bytearray], encoding: Encoding) -> list[Any]:
    """Return the values of all ranks of a run, by rank; raise as ``run`` does.

    Args:
        values: the content of the rank's files (``torchx_monarch.function``) as the hosts sent them, by rank.
    """
    if result.exit_code:
        failure = SPMDError(result)
        error = None if result.cause is None else _exception(values.get(result.cause, b""), encoding)
        if error is None:
            raise failure
        raise error from failure
    decoded, missing = dict[int, Any](), dict[int, str]()
    for rank in sorted(result.ranks):
        kind, _, data = values.get(rank, b"").partition(b"\n")
        try:
            if kind == encoding.encode():
                decoded[rank] = json.loads(data) if encoding == "json" else pickle.loads(data)
            elif kind == b"none":
                missing[rank] = f"it returned {one_line(data[:1000].decode(errors='replace'))}"
            else:
                missing[rank] = "it ended before the function returned, or its value was lost on the way"
        except Exception as error:  # unpickling calls what the data names
            missing[rank] = f"its value cannot be read: {error!r}"
    if missing:
        raise ResultError(result, decoded, missing)
    return [decoded[rank] for rank in sorted(decoded)]


def _exception(content: bytes | bytearray, encoding: Encoding) -> Exception | None:
    """Return the exception of a rank; None if it sent none that can be unpickled here."""
    kind, _, data = content.partition(b"\n")
    if kind != b"exception" or encoding == "json":
        return None
    try:
        error = pickle.loads(data)
    except Exception:  # its class is not known here, or cannot be made of its ``args``
        return None
    return error if isinstance(error, Exception) else None
