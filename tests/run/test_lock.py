"""The lock of a run folder: asking does not take it away from a run that starts."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from finetune.errors import EnvironmentProblem
from finetune.run.lock import LOCK_NAME, is_locked, lock_folder


def test_is_locked_says_whether_a_process_holds_it(tmp_path: Path) -> None:
    assert not is_locked(tmp_path)
    assert not (tmp_path / LOCK_NAME).exists()
    with lock_folder(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_a_run_starts_although_its_lock_is_asked_about_at_that_moment(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    descriptor = os.open(tmp_path / LOCK_NAME, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    closing = threading.Timer(0.02, os.close, [descriptor])
    closing.start()
    with lock_folder(tmp_path):
        assert is_locked(tmp_path)
    closing.join()


def test_a_held_lock_is_still_refused_soon(tmp_path: Path) -> None:
    with lock_folder(tmp_path):
        begin = time.perf_counter()
        with pytest.raises(EnvironmentProblem, match=f"process {os.getpid()} is training"), lock_folder(tmp_path):
            pass
        assert time.perf_counter() - begin < 5
