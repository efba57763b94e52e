"""Files and folders that no other user can change."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_MAX_PLACE_BYTES = 70  # a socket's path in it has 104 to 108 bytes, depending on the system


def require_private(path: Path) -> None:
    """Raise OSError if another user could change what `path` leads to: the file, a folder or a
    symbolic link on the way must belong to this user or root, and not be writable by others."""
    for place in _on_the_way(path):
        info = os.lstat(place)
        if info.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{place} belongs to another user")
        if stat.S_ISLNK(info.st_mode) or (
            stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX
        ):
            continue  # a sticky folder, such as /tmp, protects what is in it
        if info.st_mode & stat.S_IWOTH or (
            info.st_mode & stat.S_IWGRP and not _is_own(info.st_gid)
        ):
            raise PermissionError(f"others can write {place}; chmod go-w it")


def _on_the_way(path: Path) -> Iterator[Path]:
    seen: set[Path] = set()
    pending = [path.absolute()]
    while pending:
        start = pending.pop()
        for place in (start, *start.parents):
            if place not in seen:
                seen.add(place)
                yield place
                if place.is_symlink():
                    target = place.parent.resolve() / os.readlink(place)
                    pending.append(Path(os.path.normpath(target)))


def _is_own(group_id: int) -> bool:
    """Return whether a group is this user's alone, as many systems make one for each user."""
    try:
        group, user = grp.getgrgid(group_id), pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return group.gr_name == user.pw_name and not set(group.gr_mem) - {user.pw_name}


def temporary_place() -> str:
    """Return the folder in which to make temporary folders for sockets and programs: TMPDIR, unless
    it is too long for a socket's path or other users could replace what is in it; then another
    place of the system. Raises OSError."""
    places = []
    for place in (os.environ.get("TMPDIR"), os.environ.get("XDG_RUNTIME_DIR"), "/tmp", "/dev/shm"):
        short = place is not None and len(os.fsencode(place)) <= _MAX_PLACE_BYTES
        if place and short and os.access(place, os.W_OK | os.X_OK):
            places.append(place)
    for place in places:
        with suppress(OSError):
            require_private(Path(place))
            return place
    # In a user namespace even the root folder may belong to an unknown user.
    return places[0] if places else tempfile.gettempdir()
