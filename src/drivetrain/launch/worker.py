"""What a rank's process runs: the user's script, as if it had been started directly.

The only difference is what happens to an error nobody caught: it is left for the launcher, which
shows the first rank's and folds the others', instead of being printed by every rank at once.
Only the standard library is imported here: this comes before the user's first line.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path


def main() -> None:
    """`python -m drivetrain.launch.worker SCRIPT ARGS…` or `… -m MODULE ARGS…`."""
    words = sys.argv[1:]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path[0] = str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit:
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        _leave_for_launcher(error)
        sys.exit(getattr(error, "exit_code", 1))


def _leave_for_launcher(error: BaseException) -> None:
    text = _own_traceback(error)
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        sys.stderr.write(text)
        return
    # torchelastic's own format, so that its API finds message and time
    now_s = time.time()
    extra = {"py_callstack": text, "timestamp": str(int(now_s)), "at_s": now_s}
    document = {"message": {"message": text, "extraInfo": extra}}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(document))


def _own_traceback(error: BaseException) -> str:
    """Without the frames of this file and of runpy; a user's mistake needs none at all."""
    if _is_explained(error):
        return f"{error}\n"
    frames = error.__traceback__
    while frames is not None and _is_ours(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _is_ours(filename: str) -> bool:
    return filename == __file__ or "runpy" in filename


def _is_explained(error: BaseException) -> bool:
    """Config and environment problems say where, what and what to do."""
    return any(kind.__name__ == "ConfigError" for kind in type(error).__mro__)


if __name__ == "__main__":
    main()
