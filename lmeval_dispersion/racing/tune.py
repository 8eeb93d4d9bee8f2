"""``dispersion race --engine ray``: checkpoints race side by side on a Ray cluster.

Each checkpoint is a trial of Ray Tune, which reports its answers block by block; the contest is Tune's
scheduler, and ends the trial of a checkpoint that is dropped. Tune's own state is thrown away: the race's
folder has all answers, and a trial that begins once more reads those that it gave before.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lmeval_dispersion.errors import DispersionError, UsageError
from lmeval_dispersion.output import progress_bar
from lmeval_dispersion.racing.contest import Contest, Scores
from lmeval_dispersion.racing.folder import LINES, progress, take_out
from lmeval_dispersion.racing.rule import SHARED

if TYPE_CHECKING:
    from lmeval_dispersion.racing.folder import RaceFolder

_RETRIES = 2  # retries of a checkpoint whose worker or node was lost
_SILENCE = 20.0  # seconds in which a cluster must answer
# No files of results but ours, and Ctrl-C ends the race at once.
_TUNE = {"TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1", "TUNE_DISABLE_SIGINT_HANDLER": "1"}


def race_on_ray(
    folder: RaceFolder,
    contest: Contest,
    *,
    gpus: float | None = None,
    hidden: bool = False,
) -> None:
    """Race the checkpoints of a folder at the same time on a Ray cluster.

    The cluster is that of ``RAY_ADDRESS``, or one that is started on this machine. Each checkpoint
    gets one CPU core and its GPUs on a single node. Checkpoints begin in the order of the list.

    Args:
        folder: The race's folder.
        contest: The contest, without answers.
        gpus: GPUs for each checkpoint: a whole number, or a fraction below 1. None for one GPU, or
            for the CPU alone if the cluster has no GPU.
        hidden: Whether to hide the progress.

    Raises:
        UsageError: No node has so many GPUs, a node does not see the folder, or a worker refuses
            the race.
        DispersionError: No cluster answers at the address, Ray Tune fails, or an answer cannot be
            written.
    """
    for entry in folder.raced:
        known = folder.entrant(entry, contest).known
        if len(known.score):
            contest.add(entry.label, known)
    contest.judge_again()
    try:
        with _cluster() as most, progress_bar(hidden=hidden, every=LINES) as update:
            if gpus is not None and (not 0 <= gpus <= most or (gpus > 1 and gpus % 1)):
                raise UsageError(
                    f"expected a number of GPUs from 0 to {most:g} (the most that one node has), "
                    f"whole or below 1, got {gpus:g}",
                    argument="gpus_per_checkpoint",
                )
            resources = {"cpu": 1, "gpu": min(1, most) if gpus is None else gpus}
            _race(folder, contest, resources, _scheduler(folder, contest, update))
    finally:  # no worker writes any more
        for entry in folder.raced:
            entrant = folder.entrant(entry, contest)
            folder.ended(entrant)
            entrant.store()


def _race(
    folder: RaceFolder,
    contest: Contest,
    resources: dict[str, float],
    scheduler: Any,
) -> None:
    from ray import tune

    # Again where one failed that had dropped others, or a node was lost before its trial began.
    while going := folder.going(contest):
        if folder.allowance.spent:
            break
        with tempfile.TemporaryDirectory() as state:
            retries = tune.FailureConfig(max_failures=_RETRIES)
            tuner = tune.Tuner(
                tune.with_resources(_trial(folder, contest), resources),
                param_space={"label": tune.grid_search(going)},
                # A worker loads the tasks once, and one checkpoint after the other.
                tune_config=tune.TuneConfig(scheduler=scheduler, reuse_actors=True),
                run_config=tune.RunConfig(
                    storage_path=state,
                    verbose=0,
                    failure_config=retries,
                ),
            )
            try:
                tuner.fit()
            except tune.TuneError as error:
                raise scheduler.refused or DispersionError(
                    f"Ray Tune failed ({error}); run the same command to go on"
                ) from error


def _scheduler(
    folder: RaceFolder, contest: Contest, update: Callable[[int, int, str], None]
) -> Any:
    """The contest as a scheduler of Tune."""
    from ray.tune.schedulers import FIFOScheduler

    losses: Counter[str] = Counter()

    class Scheduler(FIFOScheduler):  # type: ignore[misc]
        refused: DispersionError | None = None

        def on_trial_result(self, controller: Any, trial: Any, result: dict[str, Any]) -> Any:
            label = trial.config["label"]
            if "refused" in result:
                self.refused = result["refused"]
                raise self.refused
            if "failed" in result:
                try:
                    take_out(folder.failed, contest, label, result["failed"])
                except DispersionError as error:
                    self.refused = error
                    raise
            if label in folder.failed:
                return self.STOP
            known = max(0, contest.count(label) - result["begin"])
            scores = result["scores"]
            folder.allowance.asked += len(scores.score) - known
            more = Scores(scores.score[known:], scores.probability[known:])
            standing = contest.add(label, more)
            update(*progress(contest, len(folder.raced), label))
            going = standing == "running" and not folder.allowance.spent
            return self.CONTINUE if going else self.STOP

        def on_trial_error(self, controller: Any, trial: Any) -> None:
            label = trial.config["label"]
            losses[label] += 1
            if losses[label] > _RETRIES:
                folder.failed[label] = (
                    f"its worker on the Ray cluster was lost {losses[label]} times; run the same "
                    "command to ask the checkpoint again"
                )
                contest.fail(label)

    return Scheduler()


def _trial(folder: RaceFolder, contest: Contest) -> Callable[[dict[str, Any]], None]:
    """Life of a checkpoint in a worker: it is asked until the contest ends it."""
    here = os.getcwd()
    path = folder.path.resolve()
    entries = {entry.label: entry for entry in folder.raced}
    asked = Contest(contest.questions, side_by_side=contest.side_by_side)  # without the answers

    def trial(config: dict[str, Any]) -> None:
        from ray import tune

        with contextlib.suppress(OSError):
            os.chdir(here)  # Tune gives each trial a folder of its own
        try:
            if not path.is_dir():
                raise UsageError(
                    f"expected a folder that every node of the cluster sees, got {path}, which "
                    f"the node {socket.gethostname()} does not see; name a folder on storage "
                    "that all nodes share",
                    argument="output_path",
                )
            with contextlib.closing(folder.entrant(entries[config["label"]], asked)) as entrant:
                begin = 0
                while begin < asked.questions:
                    scores = entrant.ask(begin, min(begin + SHARED, asked.questions))
                    tune.report({"begin": begin, "scores": scores})
                    begin += len(scores.score)
        except DispersionError as error:
            from lmeval_dispersion.racing.evaluation import CheckpointError

            tune.report({"failed" if isinstance(error, CheckpointError) else "refused": error})

    return trial


@contextlib.contextmanager
def _cluster() -> Iterator[float]:
    """Ray, joined or started; gives the most GPUs of a node."""
    import ray

    os.environ.update(_TUNE)
    if not os.environ.get("DISPERSION_DEBUG"):
        logging.getLogger("ray").setLevel(
            logging.CRITICAL
        )  # no tracebacks: a sentence has the reason
    address = os.environ.get("RAY_ADDRESS") or "local"
    host, _, port = address.rpartition(":")
    try:
        if host:  # Ray itself would go on trying for minutes
            socket.create_connection((host, int(port)), timeout=_SILENCE).close()
        extra = {"include_dashboard": False} if address == "local" else {}
        ray.init(address=address, log_to_driver=False, configure_logging=False, **extra)
    except (OSError, RuntimeError, ValueError) as error:
        if address == "local":
            raise DispersionError(
                f"Ray could not start a cluster on this machine ({error}); leave out the engine "
                "to ask one checkpoint after the other"
            ) from error
        raise DispersionError(
            f"Ray could not join the cluster at RAY_ADDRESS, {address} ({error}); check the "
            "address with `ray status`, or unset RAY_ADDRESS to start a cluster on this machine"
        ) from error
    # Tune prints even at verbosity 0, and Ray the end of a node whenever it hears of it.
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            yield max(node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"])
        finally:
            ray.shutdown()
