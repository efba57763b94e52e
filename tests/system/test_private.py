"""Files that other users could change, and the place of sockets and programs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from cbatch.system.private import require_private, temporary_place

STRANGER = 12345
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may give files away")


def writable_file(file: Path) -> None:
    file.chmod(0o646)


def file_of_a_group(file: Path) -> None:
    if os.getuid() == 0:
        os.chown(file, -1, STRANGER)
    file.chmod(0o664)


def writable_folder(file: Path) -> None:
    file.parent.chmod(0o777)


def writable_folder_above(file: Path) -> None:
    file.parent.parent.chmod(0o777)


def file_of_another(file: Path) -> None:
    os.chown(file, STRANGER, -1)


def folder_of_another(file: Path) -> None:
    os.chown(file.parent.parent, STRANGER, -1)


def link_of_another(file: Path) -> None:
    file.rename(file.with_name("real"))
    file.symlink_to("real")
    os.chown(file, STRANGER, -1, follow_symlinks=False)


def link_to_a_writable_folder(file: Path) -> None:
    other = file.parent.parent.parent / "other"
    other.mkdir()
    file.rename(other / "real")
    file.symlink_to(f"../../{other.name}/real")
    other.chmod(0o777)


def chain_of_links(file: Path) -> None:
    """The last file is private; a link on the way to it is in a folder that others can write."""
    other = file.parent.parent.parent / "other"
    other.mkdir()
    (other / "link").symlink_to(file.rename(file.with_name("real")))
    file.symlink_to(other / "link")
    other.chmod(0o777)


def make(tmp_path: Path) -> Path:
    file = tmp_path / "cache" / "compiled" / "file"
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    for place in (file, file.parent, file.parent.parent):
        place.chmod(0o700)
    return file


@pytest.mark.parametrize(
    "spoil",
    [
        writable_file,
        file_of_a_group,
        writable_folder,
        writable_folder_above,
        link_to_a_writable_folder,
        chain_of_links,
        *(
            pytest.param(spoil, marks=needs_root)
            for spoil in (file_of_another, folder_of_another, link_of_another)
        ),
    ],
)
def test_what_another_user_could_change_is_not_private(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    file = make(tmp_path)
    require_private(file)
    spoil(file)
    assert file.read_text() == "mine"
    with pytest.raises(PermissionError, match=str(tmp_path)):
        require_private(file)


def test_a_file_in_a_sticky_folder_or_reached_by_own_links_is_private(tmp_path: Path) -> None:
    file = make(tmp_path)
    (tmp_path / "link").symlink_to(file.parent)
    (tmp_path / "cache").chmod(0o1777)
    require_private(tmp_path / "link" / "file")


@pytest.mark.parametrize("trouble", ["long", "missing", "a file", "others", "empty", "relative"])
def test_sockets_have_a_place_whatever_tmpdir_says(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / ("d" * 110 if trouble == "long" else "place")
    if trouble in ("long", "others"):
        place.mkdir()
    if trouble == "a file":
        place.touch()
    if trouble == "others":
        place.chmod(0o777)
    values = {"empty": "", "relative": "no/such/place"}
    monkeypatch.setenv("TMPDIR", values.get(trouble, str(place)))
    chosen = temporary_place()
    with tempfile.TemporaryDirectory(prefix="cbatch-", dir=chosen) as folder:
        require_private(Path(folder))
        assert len(f"{folder}/1000.sock") < 104


def test_tmpdir_is_used_if_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as own:
        monkeypatch.setenv("TMPDIR", own)
        assert temporary_place() == own
