"""Processes that multiprocessing started."""

from __future__ import annotations

from multiprocessing.process import BaseProcess

_PATIENCE_S = 5.0


def end_child(process: BaseProcess) -> None:
    """Ask it to end, insist after a while, and leave nothing of it behind."""
    if process.is_alive():
        process.terminate()
        process.join(_PATIENCE_S)
    if process.is_alive():
        process.kill()
    process.join()
    process.close()
