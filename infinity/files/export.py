"""A directory of weights under construction: written aside, on the drive as a whole, then renamed to its names.

Files of weights come one by one, each whole, and the index that makes them a model comes last: whatever ends this on
the way, no reader finds a half-written file or a mixture of two models under their final names.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Final

import torch

from infinity.errors import WeightsFileError
from infinity.files.aside import held, remove_left, sync
from infinity.files.direct import WriteBehind
from infinity.files.directory import INDEX_ENDING, LOOKED_FOR, SAFE_NAME, TORCH_NAME
from infinity.files.entry import Entry, is_shell
from infinity.files.place import local_path
from infinity.files.replacing import Replacing
from infinity.files.safetensors_file import NAMES as DTYPE_NAMES
from infinity.files.shards import cut, index_of, is_part_of
from infinity.files.writers import new_writer
from infinity.files.writing import NewFile, NewSafetensorsFile, NewTorchFile

ASIDE: Final = ".infinity-export-"
FORMER: Final = ".infinity-former"
"""What the directory aside keeps of a former model until the new one has its names."""
OPEN_MAX: Final = 16
"""Files that are open at a time, two descriptors each: there may be more files than a process may open."""


class Export:
    """A context: what was not published at its end leaves nothing behind."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        entries: Mapping[str, Entry],
        *,
        aliases: Mapping[str, str] | None = None,
        file: str | None = None,
        safe: bool = True,
        max_shard_bytes: int,
    ) -> None:
        """Reserve room for everything. Raises WeightsFileError where that cannot be had, or the format has no such
        dtype, or readers would take other weights that are there for these.

        Args:
            directory: made where it is not there.
            entries: every tensor by name, in their order.
            aliases: other names of tensors, each with the one in ``entries``; torch's files have them, too.
            file: what the one file is called, or the shards after; by default as in Transformers.
            safe: safetensors, else what ``torch.save`` writes.
            max_shard_bytes: where to cut.
        """
        self.directory = local_path("save_dir", directory)
        self._file = file or (SAFE_NAME if safe else TORCH_NAME)
        self._safe, self._aliases = safe, dict(aliases or {})
        self._shards = cut(entries, self._file, max_shard_bytes)
        self._refuse(entries, is_default=file is None)
        with ExitStack() as cleanup:
            self.aside = cleanup.enter_context(_aside(self.directory))
            """Whatever else is put here is published, too."""
            kind = NewSafetensorsFile if safe else NewTorchFile
            behind = WriteBehind()
            self._files: list[NewFile] = []
            for shard in self._shards:
                own = {alias: name for alias, name in self._aliases.items() if name in shard.entries}
                self._files.append(kind(self.aside / shard.file, shard.entries, own, behind))
                cleanup.callback(self._files[-1].close)
            cleanup.callback(behind.close)  # before the files it writes are closed
            self._cleanup = cleanup.pop_all()
        self._file_of = {name: file for file in self._files for name in file.entries}
        self._open: dict[NewFile, None] = {}
        """The one that was written last is the last."""

    def _refuse(self, entries: Mapping[str, Entry], *, is_default: bool) -> None:
        """``is_default``: nobody has said by name that this file shall be beside others."""
        for name, entry in entries.items():
            if is_shell(entry.dtype) or (self._safe and entry.dtype not in DTYPE_NAMES):
                raise WeightsFileError(
                    str(self.directory / self._file),
                    f"cannot hold {name}, since its format has no {entry.dtype}",
                    "keep it in another dtype"
                    + ("" if is_shell(entry.dtype) else ", or write safe_serialization=False"),
                )
        for name in LOOKED_FOR[: LOOKED_FOR.index(self._file)] if is_default else ():
            if not is_part_of(name, self._file) and os.path.lexists(self.directory / name):
                raise WeightsFileError(
                    str(self.directory / name),
                    f"is there, and readers take it before {self._file}: they would get its weights",
                    "remove it, or name another directory",
                )

    def write(self, name: str, first: int, values: torch.Tensor) -> None:
        """Elements from ``first`` on of a tensor, row-major."""
        file = self._file_of[name]
        if file in self._open:
            del self._open[file]
        else:
            if len(self._open) == OPEN_MAX:
                oldest = next(iter(self._open))
                del self._open[oldest]
                oldest.finish()
            file.open()
        self._open[file] = None
        file.write(name, first, values)

    def publish(self) -> None:
        """Everything was written: give it its names, or where that fails, leave what was there as it was."""
        while self._open:
            self._open.popitem()[0].finish()
        index = self._file + INDEX_ENDING
        try:
            if len(self._shards) > 1:
                (self.aside / index).write_text(index_of(self._shards, {} if self._safe else self._aliases))
            written = sorted(os.listdir(self.aside), key=lambda name: (name == index, is_part_of(name, self._file)))
            for name in written:
                sync(self.aside / name)
            with Replacing(self.directory, self.aside / FORMER) as replacing:
                if len(self._shards) > 1:
                    replacing.take_away(index)  # from here to the end there is no model here
                    replacing.take_away(self._file)
                for name in written:
                    replacing.put(self.aside / name)
                for name in os.listdir(self.directory):
                    if is_part_of(name, self._file) and name not in written:
                        replacing.take_away(name)
                sync(self.directory)
        except OSError as error:
            raise WeightsFileError.of(error, str(self.directory), "written") from error

    def __enter__(self) -> Export:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._cleanup.close()


@contextmanager
def _aside(directory: Path) -> Iterator[Path]:
    """A directory inside, locked by this process as long as it lives; those that dead ones left are removed. What is
    made for it goes, too, if nothing is in there at the end."""
    absent = list(takewhile(lambda path: not os.path.lexists(path), (directory, *directory.parents)))
    with ExitStack() as stack:
        stack.callback(_remove_empty, absent)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for name in os.listdir(directory):
                if name.startswith(ASIDE):
                    remove_left(directory / name, name.removeprefix(ASIDE).partition("-")[0])
            made = partial(tempfile.mkdtemp, prefix=f"{ASIDE}{new_writer()}-", dir=directory)
            path = stack.enter_context(held(lambda: Path(made())))
        except OSError as error:
            raise WeightsFileError.of(error, str(directory), "written") from error
        yield path


def _remove_empty(directories: Sequence[Path]) -> None:
    """Remove each as long as they are empty; the deepest one comes first."""
    with suppress(OSError):
        for path in directories:
            path.rmdir()
