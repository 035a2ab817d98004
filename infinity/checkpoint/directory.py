"""A directory of checkpoints: one subdirectory a tag, and ``latest``, a file that names one of them.

A checkpoint is written beside its place, is on the disk with all its names, and then takes its place by one rename;
only then does ``latest`` name it, by another. So whatever ends the writer, a tag is whole or it is not there, and the
former checkpoint of the same tag stays until the new one has its name. The writer holds a lock on the directory that it
writes; what a dead one left is removed by the next.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

from infinity.checkpoint.disk import disk_errors, sync_directory, write_whole
from infinity.checkpoint.manifest import MANIFEST
from infinity.errors import CheckpointError, ConfigError
from infinity.files.aside import held, is_held

LATEST: Final = "latest"
ASIDE: Final = ".infinity-saving-"
REPLACED: Final = ".infinity-replaced-"
"""Names beginning so are a writer's own: what it has not finished, and what it is about to replace."""

_AT_FDCWD: Final = -100
_RENAME_EXCHANGE: Final = 2


def check_tag(tag: object) -> str:
    """``tag`` as the name of a subdirectory. Raises ConfigError where it cannot be one."""
    text = str(tag)
    if not text or "/" in text or "\0" in text or text in (LATEST, ".", "..") or text.startswith((ASIDE, REPLACED)):
        raise ConfigError("tag", tag, f"is the name of a directory: write one without slashes, other than {LATEST!r}")
    return text


def latest_tag(directory: Path) -> str | None:
    """What ``latest`` names; None where there is no such file."""
    path = directory / LATEST
    with disk_errors(path, "read"):
        try:
            return check_tag(path.read_text().strip())
        except (FileNotFoundError, NotADirectoryError):
            return None


def tags_of(directory: Path) -> list[str]:
    """The checkpoints that are whole, oldest first."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.glob(f"*/{MANIFEST}") if not path.parent.name.startswith((ASIDE, REPLACED))]
    return [path.parent.name for path in sorted(found, key=lambda path: path.stat().st_mtime_ns)]


def find(directory: Path, tag: str) -> Path:
    """The checkpoint's own directory. Raises CheckpointError if it is not there, with what is."""
    for path in (directory / tag, directory / f"{REPLACED}{tag}"):
        if (path / MANIFEST).is_file():
            return path
    there = ", ".join(tags_of(directory)[-8:]) or "none"
    problem = "is no whole checkpoint: it has no manifest" if (directory / tag).is_dir() else "is not there"
    raise CheckpointError(directory / tag, problem, f"checkpoints in {directory}: {there}")


def written_aside(directory: Path, tag: str) -> AbstractContextManager[Path]:
    """A new directory to write into, which goes unless it was published. For one process; others may write into it."""
    with disk_errors(directory, "made"):
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        aside = directory / f"{ASIDE}{tag}"
        aside.mkdir()
    return held(aside)


def publish(aside: Path, directory: Path, tag: str, *, latest: bool) -> None:
    """Everything in ``aside`` is on the disk: from now on it is the checkpoint of the tag."""
    sync_directory(aside)
    final, replaced = directory / tag, directory / f"{REPLACED}{tag}"
    with disk_errors(final, "published"):
        if not os.path.lexists(final):
            aside.rename(final)
        elif not _exchange(aside, final):
            final.rename(replaced)  # readers look there, too, until the next line is done
            aside.rename(final)
    sync_directory(directory)
    if latest:
        name_latest(directory, tag)
    for former in (aside, replaced):
        shutil.rmtree(former, ignore_errors=True)


def name_latest(directory: Path, tag: str) -> None:
    """``latest`` names the tag: the former one or this, whatever happens."""
    fresh = directory / f"{ASIDE}{LATEST}"
    fresh.unlink(missing_ok=True)
    write_whole(fresh, f"{tag}\n".encode())
    with disk_errors(directory / LATEST, "written"):
        fresh.rename(directory / LATEST)
    sync_directory(directory)


def remove_leftovers(directory: Path) -> None:
    """What writers that are dead have left: nobody holds its lock."""
    for path in directory.glob(f"{REPLACED}*"):
        tag = directory / path.name.removeprefix(REPLACED)
        if (tag / MANIFEST).is_file():
            shutil.rmtree(path)
        else:
            path.rename(tag)  # its successor never came
    for path in directory.glob(f"{ASIDE}*"):
        if path.is_dir() and is_held(path):
            raise CheckpointError(
                path, "is being written by another process", "wait for it, or save to another directory"
            )
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Each takes the other's name, at once. False where kernel or filesystem cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))
