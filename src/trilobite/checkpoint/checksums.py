"""Checksums of what a packed checkpoint holds, one for every tensor and one for every file beside them.

They stand in trilobite.json and tell damage, by disks and copies. They do not tell malice: whoever changes a tensor can
change its checksum.
"""

import zlib
from collections.abc import Iterable, Mapping

CHECKSUMS = "checksums"
"""Key of trilobite.json. In the row of a tensor of the original: by what names of packed tensors add to its own; in the
head: by file name."""


def checksum(data: bytes | memoryview) -> str:
    """CRC-32 of some bytes, as 8 hexadecimal digits."""
    return f"{zlib.crc32(data):08x}"


def of_tensor(dtype: str, data: memoryview) -> str:
    """The dtype of a tensor, in the words of safetensors, and the checksum of its bytes: `BF16 38711e4e`."""
    return f"{dtype} {checksum(data)}"


def of_tensors(name: str, tensors: Iterable[tuple[str, str, memoryview]]) -> dict[str, str]:
    """Checksums of what one tensor was packed into. name: its own    tensors: name, dtype and bytes of each."""
    return {stored.removeprefix(name): of_tensor(dtype, data) for stored, dtype, data in tensors}


def of_files(files: Mapping[str, bytes]) -> dict[str, str]:
    """Checksums of files by name."""
    return {name: checksum(data) for name, data in sorted(files.items())}
