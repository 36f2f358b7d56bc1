"""Checksums of a zip's entries, set after their bytes were written in place.

torch leaves room for a tensor's bytes in a `.pt` file, and a checksum of that room. torch.load does
not look at it; whoever opens the file as the zip that it is would call it damaged.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

_HEADER = struct.Struct("<14xLLLHH")
"""Before an entry's bytes, its name and more: checksum, sizes, lengths of those two."""
_LISTED = struct.Struct("<16xLLLHHH12x")
"""In the list at the end: the same, and the length of a remark."""
_HAS_SUM_BEHIND = 8


def set_sums(path: Path, sums: Mapping[int, int]) -> None:
    """`sums`: CRC-32, by where an entry's bytes begin in the file."""
    with zipfile.ZipFile(path) as found:
        entries, listed_at = found.infolist(), found.start_dir
    with path.open("r+b") as file:
        for entry in entries:
            file.seek(entry.header_offset)
            *_, name, extra = _HEADER.unpack(file.read(_HEADER.size))
            start = entry.header_offset + _HEADER.size + name + extra
            file.seek(listed_at)
            *_, name, extra, remark = _LISTED.unpack(file.read(_LISTED.size))
            if start in sums:
                data = struct.pack("<L", sums[start])
                places = [entry.header_offset + 14, listed_at + 16]
                if entry.flag_bits & _HAS_SUM_BEHIND:  # behind four bytes that say what it is
                    places.append(start + entry.file_size + 4)
                for place in places:
                    file.seek(place)
                    file.write(data)
            listed_at += _LISTED.size + name + extra + remark
