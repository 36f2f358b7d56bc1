"""A Ray of this machine alone, for the benchmarks that have Ray Tune's own loop beside ours."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_OBJECT_STORE_BYTES = 100_000_000
_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    # files for people, one set of them for each trial
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "PYTHONWARNINGS": "ignore",
    "OMP_NUM_THREADS": "1",
}


@contextmanager
def started(num_cpus: int) -> Iterator[Path]:
    """Started for the block and ended with it; the folder is for its studies.

    Ray finds nothing of the user's home: a token there would be asked of every worker. The
    variables are set before Ray is imported, since it reads them then.
    """
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        os.environ.pop("RAY_ADDRESS", None)
        paths = os.pathsep.join(each for each in (str(Path.cwd()), *sys.path) if each)
        os.environ.update(_SETTINGS, HOME=name, PYTHONPATH=paths)
        try:
            import ray

            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                object_store_memory=_OBJECT_STORE_BYTES,
                log_to_driver=False,
                logging_level="ERROR",
                _temp_dir=str(folder / "r"),
            )
            try:
                yield folder
            finally:
                ray.shutdown()
        finally:
            os.environ.clear()
            os.environ.update(before)


def fit(trainable: Any, space: dict[str, Any], folder: Path, **said: Any) -> Any:
    """`tune.Tuner(…).fit()`: the results; `stop` is the run's, all others are TuneConfig's.

    Workers are used again: else each trial would wait for a new process to import everything.
    """
    from ray import tune

    stop = said.pop("stop", None)
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as storage:
        found = tune.Tuner(
            trainable,
            param_space=space,
            tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True, **said),
            run_config=tune.RunConfig(storage_path=storage, stop=stop, verbose=0),
        ).fit()
    if found.errors:
        raise RuntimeError(f"{len(found.errors)} of Ray's trials failed: {found.errors[0]}")
    return found
