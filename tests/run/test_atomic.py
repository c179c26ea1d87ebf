"""A file is replaced whole or not at all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from finetune.run.atomic import write_json, write_text


def test_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "x" * 100_000 + "\udc80")
    with pytest.raises(ValueError):
        write_json(path, {"a": float("nan")})
    assert path.read_text() == '{\n  "a": 1\n}\n'
    assert list(tmp_path.iterdir()) == [path]


def test_file_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "x")
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


def test_reader_never_sees_a_part_while_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    code = (
        "import sys, itertools; from pathlib import Path; from finetune.run.atomic import write_text\n"
        "for n in itertools.count(): write_text(Path(sys.argv[1]), str(n % 10) * 500_000)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        deadline = time.monotonic() + 20
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        seen = set()
        for _ in range(50):
            text = path.read_text()
            assert len(text) == 500_000 and len(set(text)) == 1
            seen.add(text[0])
        assert len(seen) > 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    text = path.read_text()
    assert len(text) == 500_000 and len(set(text)) == 1
