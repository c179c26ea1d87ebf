"""Read text files as UTF-8, plain or compressed, and say exactly where one is no such file.

A file is read once: every check happens on the bytes as they pass, so that a broken file costs no second reading.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import stat
import zlib
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from finetune.errors import DataError, EnvironmentProblem
from finetune.recipe.paths import RELATIVE_TO

MAX_RECORD_BYTES = 32 * 1024 * 1024
"""A line or record beyond this is refused: it is many records in one, or no training example."""

_CHUNK_BYTES = 1 << 20
_START_BYTES = 4096
_OTHER_ENCODINGS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_MAGIC = {
    b"PAR1": "a Parquet file (.parquet)",
    b"ARROW1": "an Arrow file (.arrow)",
    b"\x1f\x8b": "a gzip file (.gz)",
    b"\x28\xb5\x2f\xfd": "a Zstandard file (.zst)",
    b"PK\x03\x04": "a zip or Excel file",
}
_SAVE_AS_UTF8 = "Save the file as UTF-8 text, or name it by what it holds (.parquet for Parquet)."


def require_regular(file: Path) -> None:
    """Raises unless the path is a file that can be opened and ends, so that reading cannot hang.

    Raises:
        DataError: nothing is there, or it is a folder, a pipe, a device or a circle of links, or may not be read.
    """
    try:
        mode = file.stat().st_mode
    except (OSError, ValueError) as error:
        raise _unreachable(file, error) from error
    if stat.S_ISDIR(mode):
        raise DataError("this is a folder, not a file", place=str(file), remedy="Name one data file in the folder.")
    if not stat.S_ISREG(mode):
        raise DataError(
            "this is no regular file but a pipe, socket or device, which cannot be read twice",
            place=str(file),
            remedy="Write the data into a file, and name that.",
        )
    if not os.access(file, os.R_OK):
        raise DataError("the file may not be read", place=str(file), remedy="Give yourself the right to read it.")


def read_lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yields each line with its number from 1, its line feed included; only a line feed ends a line.

    Raises:
        DataError: the file is no UTF-8 text, breaks off inside its compression, or has a line beyond the limit.
    """
    offset, number = 0, 0
    with _open(file) as stream:
        _require_text_start(stream, file)
        while True:
            try:
                line = stream.readline(MAX_RECORD_BYTES + 1)
            except (OSError, EOFError, zlib.error) as error:
                raise _broken(error, f"{file}:{number + 1}") from error
            if not line:
                return
            number += 1
            if line == b"\n":  # what else is done for a line takes long for millions of blank ones
                yield number, "\n"
            elif len(line) > MAX_RECORD_BYTES:
                raise DataError(
                    f"the line is longer than {MAX_RECORD_BYTES:,} bytes",
                    place=f"{file}:{number}",
                    remedy="Write one record on each line; store a long document as a .txt file.",
                )
            else:
                yield number, _decode(line, place=f"{file}:{number}", offset=offset, line=number)
            offset += len(line)


def read_text(file: Path) -> str:
    """Returns the whole text of a file.

    Raises:
        DataError: the file is no UTF-8 text, or breaks off inside its compression.
    """
    chunks: list[bytes] = []
    with _open(file) as stream:
        _require_text_start(stream, file)
        while chunk := _read_chunk(stream, place=str(file)):
            chunks.append(chunk)
    data = b"".join(chunks)
    chunks.clear()
    return _decode(data, place=str(file), offset=0, line=None)


def _decode(data: bytes, *, place: str, offset: int, line: int | None) -> str:
    """Decodes a line, or a whole file where `line` is None; counts lines only for a fault."""
    nul = data.find(b"\0")
    fault = f"not a text file: NUL byte at byte offset {offset + nul}"
    try:
        text = data.decode("utf-8")
        if nul < 0:
            return text[1:] if offset == 0 and text.startswith("\ufeff") else text
        at = nul
    except UnicodeDecodeError as error:
        at = error.start if nul < 0 else min(nul, error.start)
        if at != nul:
            fault = f"not UTF-8: byte 0x{data[at]:02x} at byte offset {offset + at}"
    if line is None:
        line = data.count(b"\n", 0, at) + 1
        place = f"{place}:{line}"
    raise DataError(f"{fault} (line {line})", place=place, remedy=_SAVE_AS_UTF8)


def _require_text_start(stream: io.BufferedReader | gzip.GzipFile, file: Path) -> None:
    """Names the files that are often taken for UTF-8 text, by their first bytes, before any line is looked at."""
    try:
        start = stream.peek(_START_BYTES)[:_START_BYTES]
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(error, f"{file}:1") from error
    for mark, name in _MAGIC.items():
        if start.startswith(mark):
            raise DataError(f"this is {name}, not text", place=f"{file}:1", remedy="Name the file by what it holds.")
    encoding = next((name for mark, name in _OTHER_ENCODINGS.items() if start.startswith(mark)), None)
    if encoding is None and _alternates_with_nul(start):
        encoding = "UTF-16"
    if encoding is not None:
        raise DataError(
            f"the file is {encoding} text, not UTF-8",
            place=f"{file}:1",
            remedy=f"Convert it: iconv -f {encoding} -t UTF-8 {file.name} > utf8-{file.name}",
        )
    if b"\0" in start:
        _decode(start, place=str(file), offset=0, line=None)


def _alternates_with_nul(start: bytes) -> bool:
    """Tells whether every second of the first bytes is NUL and the others are not, as in UTF-16 without a mark."""
    pairs = start[:64]
    even, odd = pairs[0::2], pairs[1::2]
    return len(odd) >= 2 and ((not any(odd) and all(even)) or (not any(even) and all(odd)))


def _open(file: Path) -> io.BufferedReader | gzip.GzipFile:
    """Opens a file for buffered reading, decompressed by its suffix."""
    require_regular(file)
    suffix = file.suffix.lower()
    if suffix == ".gz":
        return gzip.open(file, "rb")
    if suffix == ".zst":
        return io.BufferedReader(_ZstdStream(file), _CHUNK_BYTES)
    return io.BufferedReader(io.FileIO(file), _CHUNK_BYTES)


def _read_chunk(stream: io.BufferedReader | gzip.GzipFile, *, place: str) -> bytes:
    try:
        return stream.read(_CHUNK_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise _broken(error, place) from error


def _broken(error: Exception, place: str) -> DataError:
    if isinstance(error, OSError) and error.errno is not None:
        return DataError(
            f"the file cannot be read: {error.strerror}", place=place, remedy="Check the disk, then try again."
        )
    return DataError(
        f"the compressed file is broken or cut short here: {error}",
        place=place,
        remedy="Copy or download the file again; it may have been copied only in part.",
    )


class _ZstdStream(io.RawIOBase):
    """Decompresses a Zstandard file, frame after frame; unlike the package's own reader it notices a missing end."""

    def __init__(self, file: Path) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise EnvironmentProblem(
                "reading .zst files needs the package zstandard",
                place=str(file),
                remedy="Run `pip install 'finetune[zstd]'`, or decompress the file: zstd -d FILE.",
            ) from error
        self._error_type = zstandard.ZstdError
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = self._decompressor.decompressobj()
        self._is_inside = False
        self._file = file.open("rb")
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._output:
            if not self._input:
                self._input = self._file.read(1 << 16)
            if not self._input:
                if self._is_inside:
                    raise EOFError("the file ended before the end of its last frame")
                return 0
            self._advance()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _advance(self) -> None:
        try:
            self._output = memoryview(self._frame.decompress(self._input))
        except self._error_type as error:
            raise EOFError(str(error)) from error
        self._is_inside = not self._frame.eof
        self._input = b""
        if self._frame.eof:
            self._input = self._frame.unused_data
            self._frame = self._decompressor.decompressobj()


def _unreachable(file: Path, error: OSError | ValueError) -> DataError:
    code = error.errno if isinstance(error, OSError) else None
    if code == errno.ELOOP:
        message, remedy = "symbolic links lead in a circle here", "Remove the link, and name the file itself."
    elif code == errno.ENAMETOOLONG:
        message, remedy = "the name is longer than the file system allows", "Check the path; it may hold other text."
    elif code == errno.EACCES:
        message, remedy = "a folder on the way may not be entered", "Give yourself the right to enter it."
    elif file.is_symlink():
        message, remedy = "the symbolic link leads to no file", f"Correct the link; it points at {os.readlink(file)}."
    elif code in (errno.ENOENT, errno.ENOTDIR):
        message, remedy = "the file does not exist", f"Check the path. {RELATIVE_TO}"
        if not file.parent.is_dir():
            remedy = f"The folder {file.parent} does not exist either. {RELATIVE_TO}"
        elif near := get_close_matches(file.name, _names_beside(file), n=3, cutoff=0.8):
            remedy = f"Did you mean {', '.join(near)}?"
    else:
        message, remedy = f"the path cannot be used: {error}", "Check the path."
    return DataError(message, place=str(file), remedy=remedy)


def _names_beside(file: Path) -> list[str]:
    if not os.access(file.parent, os.R_OK):
        return []
    return [other.name for other in file.parent.iterdir() if other.name != file.name]
