# SPDX-License-Identifier: BSD-3-Clause
"""Everything in which a program or its caller can tell us from torchrun, each with its reason.

A difference that is not here fails a test, and a test shows each one that is. ``docs/explanation/differences.md``
holds the table that ``render`` makes, without the reasons; ``python -m tests.conformance.differences`` prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

Function = TypeVar("Function")


class Difference(Enum):
    """What differs; how it is under torchrun; how it is here; why."""

    MASTER_ADDR = (
        "`MASTER_ADDR` on one machine",
        "`localhost`",
        "`127.0.0.1`",
        "nothing has to resolve a name, and no other machine can reach the store",
    )

    MASTER_PORT = (
        "`MASTER_PORT`, unless `--master-port` or a static `--rdzv-endpoint` names it",
        "a free port, taken again later; 29500 for a static rendezvous of several hosts",
        "a free port, held from the first moment",
        "no other job can take it in between",
    )
    ERROR_FILE = (
        "`TORCHELASTIC_ERROR_FILE` without `--log-dir`",
        "in a new folder under `/tmp`, which stays",
        "in the job's own log folder",
        "it is found again, and removed with the job's logs",
    )
    RUN_ID = (
        "`TORCHELASTIC_RUN_ID` on one machine",
        "a random one, whatever `--rdzv-id` says, unless a rendezvous endpoint is given",
        "`--rdzv-id`, or else the app's id",
        "`torchx status` and `torchx log` know the job by it",
    )
    RELATIVE = (
        "`TORCHELASTIC_ERROR_FILE` with a relative `--log-dir`",
        "relative before Python 3.12: a script that changes its folder loses it",
        "absolute",
        "it is found wherever the script has gone",
    )
    PRELOAD = (
        "Modules imported before the script begins",
        "none",
        "torch, and the installed modules that the script imports in its first statements; torch alone with `-cfg "
        "preload=torch`, none with `-cfg ranks=fresh`. What torch prints then is in the host's log. "
        "Modules of the standard library that they import are in `sys.modules` from the start; others once the "
        "program imports them, and until then `sys.meta_path` has one more finder",
        "one interpreter per host imports them while the hosts find each other, which is most of a start",
    )

    MONARCH_LOG = (
        "`MONARCH_LOG_SUFFIX` and `MONARCH_FILE_LOG` in a rank's environment",
        "as the caller has them",
        "set: a rank that imports Monarch has its errors on stderr",
        "Monarch would log below `/tmp`, where another user can put a link",
    )
    THIS_JOB = (
        "`MONARCH_THIS_JOB`, `MONARCH_STEPS`, `MONARCH_CHECKPOINTS` in a rank's environment",
        "not set",
        "where `this_job()`, `steps` and `checkpoint` find the job's hosts",
        "a torchrun program can use its own hosts as a Monarch mesh, stop at one step and save in their memory",
    )
    STARTUP_FILES = (
        "`sitecustomize`, `usercustomize` and `.pth` files of a rank",
        "see its whole environment",
        "run once per host, without `RANK` and the like in the environment, unless `-cfg preload=none`",
        "ranks are forks of an interpreter that has started before",
    )
    AT_FORK = (
        "Functions that a start-up file, or an import that ranks share, registers with `os.register_at_fork`",
        "called when the script forks",
        "also when the ranks are born, as forks; what they print before is in the host's log",
        "those of Python and of packages renew locks and random generators, and no fork can tell which are which",
    )
    EARLY_VARIABLES = (
        "A variable that only an import of torch reads (`PYTORCH_ALLOC_CONF`, `TORCH_TRACE`, `KMP_*`, ...), set by "
        "the script before it imports torch",
        "has effect",
        "has none where torch is preloaded, and rank 0 says so. `OMP_NUM_THREADS`, `MKL_NUM_THREADS`, "
        "`OPENBLAS_NUM_THREADS`, the processors that the script chooses, `TORCH_LOGS` and "
        "`TORCH_DISTRIBUTED_DEBUG` have effect in any case. Set others by `--env`",
        "torch has been imported ahead",
    )

    NO_TEXT = (
        "A script that cannot be decoded (NUL, not UTF-8, unknown coding)",
        "SyntaxError in the words of `python script.py`",
        "SyntaxError in the words of `import script`",
        "the script is compiled from memory; exit code and kind of error are the same",
    )
    NUMA = (
        "`--numa-binding`",
        "ranks are started through `numactl`, which must be installed; what is wrong is a traceback of the launcher",
        "each rank binds itself before the program begins; what is wrong is one line",
        "torch chooses the same CPUs, and no tool has to be there",
    )
    MISSING_SCRIPT = (
        "A script that does not exist",
        "every rank starts and prints that it cannot open it",
        "one line from the launcher, no rank",
        "no rank is started that could only fail; the exit code is the one that it would have, 2",
    )
    EXECUTABLE = (
        "`--no-python` with a program that cannot be executed",
        "traceback of the launcher, exit code 1",
        "one line in the rank's stderr, exit code 127 (not found) or 126",
        "as a shell does",
    )

    CALL_STACK = (
        "The bottom of the call stack (`inspect.stack()`, `sys._getframe`)",
        "the script",
        "`zygote_main.py` and `rank_main.py`, or the latter alone with `-cfg ranks=fresh`, then the script",
        "the program runs in an interpreter that was started ahead; tracebacks are printed without those frames",
    )
    FAULTHANDLER = (
        "`faulthandler`",
        "off",
        "on, and a real-time signal (`SIGRTMAX-3`) has the stacks of all threads written for the host",
        "a crash, and a rank that hangs, show where they are; a script may switch it off or point it elsewhere",
    )
    STACKS = (
        "An open file of a rank",
        "none beside stdin, stdout and stderr",
        "one more, of the highest number up to 1023, which programs that it starts do not get",
        "`torchx monarch stacks` does not write among the program's own output",
    )
    EVIDENCE = (
        "Files of an attempt whose ranks were stopped",
        "`stdout.log`, `stderr.log` and `error.json` of each rank",
        "also `stacks.txt`, and what torch's flight recorder has, in `flight_recorder/`",
        "they say where each rank was, and in which collective",
    )
    RECORDER = (
        "A rank that has formed a process group, with torch preloaded",
        "has torch's threads and sockets",
        "has one more thread, which `threading` does not list, and one more socket, of a number near 1023",
        "the host asks through them for what torch's flight recorder has; the thread sleeps until then",
    )
    STACKS_SIGNAL = (
        "A rank that is about to be stopped",
        "gets SIGTERM",
        "gets `SIGRTMAX-3` before, and SIGTERM when its stacks are written, 0.5 s later at most. A C function that "
        "does not repeat an interrupted system call is interrupted, as by any signal that has a handler",
        "`attempt_N/stacks.txt` says where it was",
    )
    BREAKPOINT = (
        "`breakpoint()` and `pdb.set_trace()`",
        "read commands from the launcher's stdin, of one rank at a time, and end the rank where it is empty",
        "wait `-cfg debug_wait` seconds for `torchx monarch debug`, and go on without a debugger. `pdb.set_trace` "
        "is another function, and until pdb is imported `sys.meta_path` has one more finder",
        "each rank has a terminal of its own, and a forgotten breakpoint ends no job. `PYTHONBREAKPOINT` and "
        "`sys.breakpointhook` mean what they do elsewhere",
    )
    STREAMS = (
        "What stdout and stderr of a rank are",
        "what the launcher has, or files",
        "pipes that the host process reads",
        "one reader numbers, prefixes and stores lines, none of them torn by another rank",
    )
    STDIN = (
        "stdin of a rank",
        "the launcher's, shared by all ranks",
        "empty",
        "the job is no child of the terminal that submitted it",
    )
    BLOCKED = (
        "Signals that the submitter blocks, and SIGCHLD if it ignores that",
        "blocked and ignored in the ranks, too; with SIGCHLD ignored, a rank that fails counts as successful",
        "neither blocked nor ignored",
        "a job can be stopped, whoever has submitted it, and a failure is seen",
    )
    DEATH_WITH_HOST = (
        "A rank whose launcher is killed",
        "runs on",
        "is killed",
        "no rank keeps a GPU that nobody knows of",
    )

    STORE = (
        "Where the job's TCPStore is served without torch preloaded (`-cfg preload=none`, `--no-python`)",
        "in the launcher, with `TORCHELASTIC_USE_AGENT_STORE` `True`",
        "in rank 0's program, with `TORCHELASTIC_USE_AGENT_STORE` `False`",
        "to import torch for it alone would take seconds",
    )
    SHARED_BY_FORKS = (
        "What the interpreters of a host's ranks share",
        "nothing",
        "addresses in memory (`id`, ASLR), the seed of string hashes, and what preloaded modules have computed "
        "when they were imported; with `-cfg ranks=fresh` nothing. Made anew in each rank: ids, tokens and times "
        "that modules keep, random generators, unless their module has given them a seed, `multiprocessing` keys, "
        "`tempfile` and the like",
        "they are forks of one interpreter. Hashes and addresses decide the order of sets alone, unless a program "
        "takes them for a seed. A module that seeds the generators of `random`, numpy or torch, or makes memory that "
        "forks share, is imported by each rank",
    )
    NEW_STORE = (
        "The job's TCPStore after a restart",
        "the one of the attempt before, with what that has written, on the same port",
        "a new one, empty, on another port unless the user names it",
        "ranks that find the addresses of dead ones in it fail or hang",
    )
    EXIT_CODE = (
        "Exit code of the job when a rank fails",
        "1",
        "that of the rank which began it; 128 + N for signal N, as in a shell",
        "the caller can tell an assertion from a kill for memory",
    )

    UNRECORDED = (
        "Error file of a program without `@record`",
        "none",
        "as with `@record`",
        "the report names the exception and shows its traceback",
    )

    ALL_FILES = (
        "Log files of streams that are not redirected",
        "none",
        "`stdout.log` and `stderr.log` of every rank, always",
        "what a rank said is still there when it is asked for",
    )
    LOG_DIR = (
        "Folder of a run below `--log-dir`",
        "`ID_xxxxxxxx`, a new one each time",
        "`ID`, shared by the hosts: give each run an `--rdzv-id` of its own, or none. `filtered_*.log` of host N is "
        "`filtered_*.N.log`, except for host 0",
        "its path is known before",
    )
    TEE = (
        "`--tee`, filtered or not, of carriage returns, bytes that are not UTF-8, a last line without an end, and "
        "of lines being written",
        "a carriage return begins a line with a prefix; bytes become U+FFFD; half a line may get a prefix of its own",
        "bytes are passed on as they are, one prefix after each line feed; the last line is ended",
        "a progress bar stays one line, and output can be compared with the file it is also in",
    )

    TORN = (
        "Lines of several ranks without `--tee`",
        "mixed within a line: `print` of an unbuffered interpreter writes piece by piece",
        "whole lines; one of more than 64 kB, or a progress bar, is shown in pieces, and a piece that another "
        "rank's line parts from the one before begins with `[continued]`",
        "one can read it; a rank's own file gets every byte at once",
    )

    SIGNALLED = (
        "Exit code after a signal to the launcher",
        "1, after a traceback of the launcher",
        "128 + the signal",
        "as a shell has it; a scheduler knows its own SIGTERM again",
    )
    LEFTOVERS = (
        "Processes that a rank leaves running when it ends",
        "run on",
        "when all ranks of the host have ended, get SIGTERM, and SIGKILL 2 s later; those that have left the rank's "
        "process group have 4 s to end by themselves before that",
        "a forgotten data loader holds no memory of a GPU",
    )

    RESTARTS = (
        "Failures after which `--max-restarts` starts no other attempt",
        "none",
        "exit code 78 (EX_CONFIG); a program that cannot begin; the second time in a row that a rank fails in "
        "`init_process_group` and has been in no group yet",
        "another attempt would end in the same way; the log says so",
    )

    TIMERS = (
        "A timer of `torch.distributed.elastic.timer` that expires (`TORCHELASTIC_ENABLE_FILE_TIMER=1`)",
        "the rank gets the timer's signal, and then the launcher: by default both are killed, and other ranks run on",
        "the rank gets the timer's signal; it has failed, and the job ends or restarts as after any failure",
        "the report names the rank and its timer; the pipe is in the job's own folder, not in `/tmp`",
    )

    KERNEL_TIMEOUT = (
        "`TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT` with a rank that is in state D for so long",
        "the job ends with code 0 when the rank is gone (torch 2.13)",
        "the rank has failed, with its host and the file for which it waits; exit code 1, or a restart. Without the "
        "variable the watch for hangs names it",
        "a job whose rank was stuck has not succeeded",
    )
    SHUTDOWN_TIMEOUT = (
        "`--shutdown-timeout` after a rank has failed",
        "not looked at: always 30 s",
        "holds, as after a signal",
        "the option says so",
    )
    NOT_BEGUN = (
        "`--max-restarts` with a program that cannot begin (a syntax error, no such module)",
        "started again as often as allowed",
        "not started again",
        "it would fail the same way; an import that fails within the program is another matter",
    )
    RESTART_DELAY = (
        "`--max-restarts` with a program that fails again and again at once",
        "started again at once each time",
        "the first restart is immediate; further ones wait 1, 2, 4 … 60 s, with jitter, until an attempt has lived "
        "for a minute",
        "a thousand restarts would be spent within minutes",
    )
    SEVERAL_HOSTS = (
        "`--max-restarts` on several hosts",
        "each launcher counts the failures of its own ranks, and they see that in `TORCHELASTIC_RESTART_COUNT`",
        "one budget and one count for the job",
        "all ranks start again together, and see which attempt it is",
    )
    OTHER_HOSTS = (
        "Ranks on other hosts when one fails for good, and their launchers",
        "run on until they fail by themselves; a launcher whose ranks have ended waits five minutes",
        "are stopped; every launcher ends, with the same exit code",
        "nobody pays for hosts that wait for lost ones",
    )
    USER_SIGNALS = (
        "SIGUSR1 and SIGUSR2 to the launcher, when `--signals-to-handle` does not name them",
        "end the launcher, whose ranks run on",
        "go to the ranks, and the job goes on",
        "schedulers send them ahead of a time limit, and only the program knows what to do",
    )

    LOST_HOST = (
        "A host of an elastic job that is lost, or told to stop alone",
        "the ranks of the others fail, which counts for `--max-restarts`, or wait for theirs to time out",
        "the ranks of the others are stopped and start again without it, and nothing is counted",
        "the loss of a host is no fault of the program",
    )
    LAST_CALL = (
        "A host that joins an elastic job when others are still missing",
        "all ranks are stopped, and then wait for `last_call_timeout`",
        "the ranks run on for that time, and are stopped then",
        "hosts that come one after the other are one interruption",
    )
    RESTARTS_BEFORE = (
        "`TORCHELASTIC_RESTART_COUNT` of the ranks of a host that has joined",
        "0",
        "as on all other ranks",
        "ranks of one world agree on it; torch's own rendezvous puts it into the names of its keys",
    )

    def __init__(self, what: str, torchrun: str, here: str, reason: str) -> None:
        self.what = what
        self.torchrun = torchrun
        self.here = here
        self.reason = reason


def differs(*differences: Difference) -> Callable[[Function], Function]:
    """Return a decorator for what shows these differences (see ``test_against_torchrun``)."""
    assert differences
    return lambda function: function


def render() -> str:
    """Return the table of the page."""
    rows = [f"| {' | '.join(difference.value[:3])} |\n" for difference in Difference]
    return "".join(["| What | Under torchrun | Here |\n", "|---|---|---|\n", *rows])


if __name__ == "__main__":
    print(render(), end="")
