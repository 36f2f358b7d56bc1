"""A slow disk for real: a file system on a loop device, whose reads the kernel holds back."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BYTES_PER_S = 32 << 20


@contextmanager
def slow_disk(folder: Path) -> Iterator[Path]:
    """A file of 4 MiB on it; needs root and the blkio controller (cgroup version 1)."""
    folder.mkdir()
    image = folder / "image"
    image.write_bytes(b"\0" * (32 << 20))
    mounted = folder / "mounted"
    mounted.mkdir()
    _do("mkfs.ext4", "-q", str(image))
    device = _do("losetup", "--find", "--show", str(image)).strip()
    limit = Path("/sys/fs/cgroup/blkio/blkio.throttle.read_bps_device")
    number = os.stat(device).st_rdev
    where = f"{os.major(number)}:{os.minor(number)}"
    try:
        _do("mount", device, str(mounted))
        file = mounted / "data.bin"
        file.write_bytes(os.urandom(4 << 20))
        os.sync()
        limit.write_text(f"{where} {_BYTES_PER_S}")
        yield file
    finally:
        limit.write_text(f"{where} 0")
        subprocess.run(["umount", "-l", str(mounted)], check=False)
        subprocess.run(["losetup", "-d", device], check=False)


def _do(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
