"""Files about the end of a run are written where no other user has prepared anything, and read from anywhere."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from fullshard.debug.crashes import read_crashes
from fullshard.ranks.crash import FOLDER_VARIABLE, crash_folder, write_crash
from fullshard.ranks.verdict import Report


def write() -> None:
    write_crash(0, 1, Report("runs", "the forward of the root"), None)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in the temporary folder, which does not exist yet."""
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    return crash_folder()


def test_the_folder_is_this_users_alone(folder: Path) -> None:
    """It is made so, and stays so; files are replaced."""
    write()
    folder.chmod(0o777)
    write()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == ["rank0.json"] and read_crashes(folder).keys() == {0}


def test_a_folder_that_another_user_has_prepared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link, a file or a folder of another user is refused with the variable that chooses another folder."""
    target = tmp_path / "target"
    target.mkdir()
    folder.symlink_to(target)
    with pytest.raises(OSError, match=f"is a link.* set {FOLDER_VARIABLE}"):
        write()
    folder.unlink()
    folder.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    monkeypatch.setattr("fullshard.ranks.crash.crash_folder", lambda: folder)  # whose name has the number of the user
    with pytest.raises(OSError, match=f"another user.* set {FOLDER_VARIABLE}"):
        write()
    assert not list(target.iterdir()) and not list(folder.iterdir())


@pytest.mark.parametrize("name", ["rank0.partial", "rank0.json"])
def test_links_to_files_are_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Also in a folder that the user has chosen, which may be a link, or shared."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "link"))
    victim = tmp_path / "victim"
    victim.write_text("kept")
    (tmp_path / "folder" / name).symlink_to(victim)
    write()
    assert victim.read_text() == "kept" and read_crashes(tmp_path / "folder").keys() == {0}


def test_files_of_others_are_read_with_care(tmp_path: Path) -> None:
    """Pipes, deep JSON and other values than objects are refused in short words."""
    file = tmp_path / "rank0.json"
    os.mkfifo(file)
    with pytest.raises(ValueError, match="no regular file"):
        read_crashes(tmp_path)
    file.unlink()
    for text in ("[" * 10**5, "[]", '"x"', "3", '{"format": "' + "x" * 10**4 + '"}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"rank0\.json: expected what a rank writes") as caught:
            read_crashes(tmp_path)
        assert len(str(caught.value)) < 300 + 200 + len(str(file))
