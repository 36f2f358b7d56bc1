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
        if _collects_errors(sys.excepthook):
            sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(error.exit_code if _is_ours(error) else 1)  # type: ignore[attr-defined]


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
    partial = Path(f"{path}.partial")
    partial.write_text(json.dumps(document))
    partial.replace(path)


def _own_traceback(error: BaseException) -> str:
    """Without the frames of this file and of runpy; a user's mistake needs none at all."""
    if _is_ours(error) and getattr(error, "problems", None):
        return f"{error}\n"  # where, what and what to do: no frames needed
    frames = error.__traceback__
    while frames is not None and _starts_scripts(frames.tb_frame.f_code.co_filename):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))


def _collects_errors(hook: object) -> bool:
    """A hook of the user's (Sentry, rich …); torch's own would only print it with a prefix."""
    return hook is not sys.__excepthook__ and not getattr(hook, "__module__", "").startswith(
        "torch"
    )


def _starts_scripts(filename: str) -> bool:
    return filename == __file__ or "runpy" in filename


def _is_ours(error: BaseException) -> bool:
    """Raised by Drivetrain on purpose; told by name, so that nothing need be imported."""
    return any(kind.__module__ == "drivetrain.core.errors" for kind in type(error).__mro__)


if __name__ == "__main__":
    main()
