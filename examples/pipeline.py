# SPDX-License-Identifier: BSD-3-Clause
"""A pipeline of jobs with TorchX's Runner: split real data, try settings side by side, keep the best::

    python examples/pipeline.py --scheduler monarch_local --folder /tmp/digits

Three kinds of jobs, each a ``monarch.spmd`` of this very file:

1. ``split`` divides the 1797 handwritten digits that come with scikit-learn into folds, one for each rank to come;
2. ``fit``, once for each setting, all at the same time: rank K trains on all folds but K and is judged on that one;
3. ``report`` names the best setting.

What a job finds out is kept by a TorchX tracker, and each job is told its parent (``parent_run_id``): the ranks of
``fit`` find the folds among the artifacts of their parent. Settings that take too long are cancelled.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from torchx.runner import Runner, get_runner
from torchx.specs import AppState
from torchx.tracker import app_run_from_env
from torchx.tracker.backend.fsspec import create as open_tracker

SETTINGS = ("0.0001", "0.01", "10")
FOLDS = 2


# -- what the jobs run -------------------------------------------------------------------------------------------------


def split(folder: Path) -> None:
    """Write the folds, and say where."""
    import numpy
    from sklearn.datasets import load_digits
    from sklearn.model_selection import StratifiedKFold

    images, labels = load_digits(return_X_y=True)
    folds = numpy.zeros(len(labels), dtype=int)
    for number, (_, held_out) in enumerate(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, labels)):
        folds[held_out] = number
    path = folder / "folds.npz"
    numpy.savez(path, images=images / 16, labels=labels, folds=folds)
    run = app_run_from_env()
    run.add_metadata(images=len(labels), folds=FOLDS)
    run.add_artifact("folds", str(path))
    print(f"{len(labels)} images in {FOLDS} folds", flush=True)


def fit(alpha: float) -> None:
    """Train without this rank's fold, and judge by it."""
    import numpy
    from sklearn.linear_model import SGDClassifier

    rank = int(os.environ["RANK"])
    run = app_run_from_env()
    (parent,) = {source.parent.id for source in run.sources()}
    (tracker,) = run.backends
    data = numpy.load(tracker.artifacts(parent)["folds"].path)
    ours = data["folds"] == rank
    model = SGDClassifier(alpha=alpha, random_state=0).fit(data["images"][~ours], data["labels"][~ours])
    reached = float(model.score(data["images"][ours], data["labels"][ours]))
    run.add_metadata(**{f"accuracy_{rank}": reached, "alpha": alpha})
    print(f"alpha {alpha:g}, fold {rank}: {reached:.2%}", flush=True)


def report() -> None:
    """Name the best of the jobs that have the same parent as this one."""
    run = app_run_from_env()
    (parent,) = {source.parent.id for source in run.sources()}
    (tracker,) = run.backends
    found = []
    for run_id in tracker.run_ids(parent_run_id=parent):
        known = tracker.metadata(run_id)
        reached = [known[key] for key in known if key.startswith("accuracy_")]
        if len(reached) == FOLDS:
            found.append((sum(map(float, map(str, reached))) / FOLDS, known["alpha"]))
    best, alpha = max(found)
    run.add_metadata(best=alpha, accuracy=best)
    print(f"best of {len(found)}: alpha {alpha} with {best:.2%}", flush=True)


# -- the driver --------------------------------------------------------------------------------------------------------


class Pipeline:
    """Submits the jobs and waits for them.

    Args:
        runner: TorchX's.
        scheduler: where the jobs run.
        folder: for the data and the tracker's files; every host must see it.
        patience: seconds after which a setting that is not done is cancelled.
    """

    def __init__(self, runner: Runner, scheduler: str, folder: Path, patience: float) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._folder = folder
        self._patience = patience
        (folder / "tracker").mkdir(parents=True, exist_ok=True)
        config = folder / "tracker.conf"
        config.write_text(f"protocol=file\nroot_path={folder / 'tracker'}\n")
        # TorchX puts both into the environment of every role.
        os.environ["TORCHX_TRACKERS"] = "fsspec"
        os.environ["TORCHX_TRACKER_FSSPEC_CONFIG"] = str(config)
        self.tracker = open_tracker(str(config))

    def submit(self, stage: str, *args: str, nproc: int = 1, parent: str | None = None) -> str:
        """Start a job; its handle. What the dry run returns is what is submitted: it can be looked at before."""
        words = ["--nproc", str(nproc), "--name", stage, __file__, "--folder", str(self._folder)]
        words += ["--stage", stage, *args]
        cfg = {"preload": "none"}  # these jobs do without torch
        info = self._runner.dryrun_component("monarch.spmd", words, self._scheduler, cfg, parent_run_id=parent)
        handle: str = self._runner.schedule(info)
        print(f"{stage} {' '.join(args)}: {handle}", flush=True)
        return handle

    def finish(self, handle: str, timeout: float | None = None) -> AppState:
        """Wait for a job and print its log; one that takes longer than ``timeout`` seconds is cancelled."""
        until = None if timeout is None else time.monotonic() + timeout
        status = self._runner.status(handle) if timeout is not None else self._runner.wait(handle, wait_interval=0.2)
        while status is not None and not status.is_terminal():
            if until is not None and time.monotonic() > until:
                self._runner.cancel(handle)
                status = self._runner.wait(handle, wait_interval=0.2)
            else:
                time.sleep(0.2)
                status = self._runner.status(handle)
        if status is None:
            raise LookupError(f"{handle} is gone")
        for role in status.roles:
            for line in self._runner.log_lines(handle, role.role, regex="^(?!\\[monarch)"):
                print(f"  {line.rstrip()}", flush=True)
        print(f"  {status.state.name}", flush=True)
        return AppState(status.state)

    def run(self, settings: tuple[str, ...]) -> int:
        """All of it; the exit code."""
        data = self.submit("split")
        if self.finish(data) is not AppState.SUCCEEDED:
            return 1
        handles = [self.submit("fit", "--alpha", alpha, nproc=FOLDS, parent=data) for alpha in settings]
        ended = [self.finish(handle, self._patience) for handle in handles]
        if AppState.FAILED in ended or AppState.SUCCEEDED not in ended:
            return 1
        last = self.submit("report", parent=data)
        if self.finish(last) is not AppState.SUCCEEDED:
            return 1
        ours = {data, last, *handles}
        for app in self._runner.list(self._scheduler):
            if app.app_handle in ours:
                print(f"{app.state.name:10} {app.app_handle}", flush=True)
        return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--scheduler", default="monarch_local")
    parser.add_argument("--folder", type=Path, default=Path("digits-pipeline"))
    parser.add_argument("--patience", type=float, default=300.0, help="seconds that a setting may take (default: 300)")
    parser.add_argument("--settings", default=",".join(SETTINGS), help="values of alpha, with commas")
    parser.add_argument("--stage", choices=("split", "fit", "report"), help="be one of the jobs")
    parser.add_argument("--alpha", type=float, default=0.0001)
    args = parser.parse_args()
    if args.stage == "split":
        split(args.folder)
    elif args.stage == "fit":
        fit(args.alpha)
    elif args.stage == "report":
        report()
    else:
        with get_runner() as runner:
            pipeline = Pipeline(runner, args.scheduler, args.folder.absolute(), args.patience)
            return pipeline.run(tuple(args.settings.split(",")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
