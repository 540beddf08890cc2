"""The files in which the engine keeps saved states, read and written from outside: to compare them, and to damage them.

Magic, length of the header, header (JSON), XXH64 of that; parts, XXH64 of everything. The first part is the tokens.
"""

import json
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import xxhash

MAGIC = b"POLYKV02"
ONE_TOKEN = bytes(4)
EMPTY_HEADER = {"tag": "t", "fingerprint": "f", "from": 0, "n_tokens": 1, "ckpts": []} | {
    "tokens_hash": xxhash.xxh64_hexdigest(ONE_TOKEN),
    "n_tgt": 0,
    "n_dft": 0,
    "n_spec": 0,
}


@dataclass
class StateFile:
    """``parts``: everything between the checksums of the header and of the file."""

    header: dict[str, Any]
    parts: bytes

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.parse(path.read_bytes())

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        n_header = int.from_bytes(raw[8:16], "little")
        assert raw[:8] == MAGIC
        end = 16 + n_header
        for at in (end, len(raw) - 8):
            assert raw[at : at + 8] == checksum(raw[:at])
        return cls(json.loads(raw[16:end]), raw[end + 8 : -8])

    def raw(self) -> bytes:
        """As the engine would write it, with right checksums."""
        return raw_file(json.dumps(self.header).encode(), self.parts)


def raw_file(header: bytes, parts: bytes) -> bytes:
    content = MAGIC + len(header).to_bytes(8, "little") + header
    content += checksum(content) + parts
    return content + checksum(content)


def checksum(content: bytes) -> bytes:
    return xxhash.xxh64_intdigest(content).to_bytes(8, "little")


def disk(folder: Path, mib: int = 100) -> tuple[str, ...]:
    """Flags of a server that keeps its states there."""
    return ("--polykv-save-path", str(folder), "--polykv-save-disk", str(mib))


def name_of(number: int) -> str:
    """A name as the engine makes them."""
    return f"{number:016x}-{number}.state"


def state_files(folder: Path) -> dict[str, Path]:
    """The files by the tags in them."""
    files = {StateFile.read(path).header["tag"]: path for path in folder.glob("*.state")}
    assert len(files) == len(list(folder.glob("*.state"))), "two files with one tag"
    return files


def contents(folder: Path) -> dict[str, bytes]:
    return {tag: path.read_bytes() for tag, path in state_files(folder).items()}


def is_private(path: Path) -> bool:
    """True if nobody but the owner can read it."""
    return stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
