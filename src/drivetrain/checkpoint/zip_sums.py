"""Set the checksums of a zip's entries after their bytes were written in place.

torch reserves space for a tensor's bytes in a `.pt` file, with a checksum of the empty space.
torch.load does not verify it, but zip tools would report the file as damaged.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

_HEADER = struct.Struct("<14xLLLHH")
"""An entry's local header: checksum, sizes, lengths of the name and the extra field."""
_LISTED = struct.Struct("<16xLLLHHH12x")
"""The same in the central directory, with the length of a comment."""
_HAS_SUM_BEHIND = 8


def set_sums(path: Path, sums: Mapping[int, int]) -> None:
    """`sums`: CRC-32 by the offset of an entry's bytes in the file."""
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
                if entry.flag_bits & _HAS_SUM_BEHIND:  # after a four-byte signature
                    places.append(start + entry.file_size + 4)
                for place in places:
                    file.seek(place)
                    file.write(data)
            listed_at += _LISTED.size + name + extra + remark
