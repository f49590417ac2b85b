from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pnode.home import Home, HomeGoneError
from wire.errors import UsageError


def replace(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def link_elsewhere(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.with_name("other").mkdir()
    path.symlink_to(path.with_name("other"))


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (shutil.rmtree, "deleted or moved away"),
        (lambda path: path.rename(path.with_name("aside")), "deleted or moved away"),
        (replace, "replaced by another one"),
        (link_elsewhere, "replaced by another one"),
    ],
)
def test_it_is_noticed(tmp_path: Path, what: Callable[[Path], None], says: str) -> None:
    path = tmp_path / "deep" / "home"
    home = Home(path)
    try:
        for _ in range(3):
            home.check()
        what(path)
        with pytest.raises(HomeGoneError, match=says) as told:
            home.check()
        assert str(path) in str(told.value)
    finally:
        home.close()


def test_its_number_is_never_given_to_another_folder(tmp_path: Path) -> None:
    """Most file systems give the number of a deleted folder to the next one, at once."""
    path = tmp_path / "home"
    home = Home(path)
    try:
        for _ in range(50):
            replace(path)
            with pytest.raises(HomeGoneError):
                home.check()
    finally:
        home.close()


def test_what_is_written_below_it_changes_nothing(tmp_path: Path) -> None:
    home = Home(tmp_path)
    try:
        (tmp_path / "blobs").mkdir()
        shutil.rmtree(tmp_path / "blobs")
        os.utime(tmp_path)
        tmp_path.chmod(0o755)
        home.check()
    finally:
        home.close()


def test_where_none_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UsageError, match="no home folder at"):
        Home(tmp_path / "file")
    with pytest.raises(UsageError, match="no home folder at"):
        Home(tmp_path / "file" / "home")
