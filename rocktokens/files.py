"""Files of a run: written whole or not at all, told apart by digest, and refused with one sentence where damaged.

`writing` and `reading` are the two places where errors of the operating system and of file formats become RunError and
DataError. This module knows files; it does not know what is in them.
"""

from __future__ import annotations

import errno
import functools
import glob
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rocktokens.errors import DataError, RunError

# A larger file is told apart by its size and evenly spaced blocks: reading 50 GB to say "nothing to do" takes minutes.
WHOLE_DIGEST_BYTES = 256 * 2**20
BLOCK_BYTES, BLOCKS = 2**20, 64

REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space, then repeat the command",
    errno.EDQUOT: "the disk quota is used up; free some space, then repeat the command",
    errno.EROFS: "the file system is read-only; choose another directory",
    errno.EACCES: "you may not write there; change its permissions or choose another directory",
    errno.EPERM: "you may not write there; change its permissions or choose another directory",
    errno.ENAMETOOLONG: "the name is too long for this file system; choose a shorter one",
    errno.ENOENT: "the directory is gone; was the run moved or deleted?",
    errno.EEXIST: "a file stands where a directory is needed; choose another directory",
    errno.ENOTDIR: "a part of the path is a file; choose another directory",
    errno.EISDIR: "a directory has that name; remove it or choose another directory",
    errno.EIO: "the disk reports an error; check it, then repeat the command",
    errno.EFBIG: "the file system does not hold files of this size; choose another directory",
}


# ---------------------------------------------------------------- writing


def draft_of(path: Path) -> Path:
    """A name of this process's own to write under; drafts of the same file that ended processes left are removed."""
    remove_left_drafts(path.parent, glob.escape(path.name))
    return path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:6]}.tmp")


def remove_left_drafts(folder: Path, pattern: str = "*") -> None:
    """Remove the drafts in a folder, of files whose names fit the pattern, that ended processes left."""
    for left in folder.glob(f".{pattern}.*.tmp"):
        owner = left.name.removesuffix(".tmp").rpartition(".")[2].partition("-")[0]
        if not owner.isdigit() or int(owner) == os.getpid() or not _is_alive(int(owner)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)


def is_draft(path: Path) -> bool:
    """Whether a file is an unfinished one that nobody reads."""
    return path.name.endswith(".tmp")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


@contextmanager
def failing(path: Path) -> Iterator[None]:
    """Errors of the operating system inside become RunError: what could not be written and what to do."""
    try:
        yield
    except BaseException as error:
        if _is_write_error(error):
            raise write_error(path, error) from error
        raise


@contextmanager
def drafting(path: Path) -> Iterator[Path]:
    """Yields a name to write under; what still has that name at the end of the block is removed."""
    with failing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)
    try:
        yield draft
    finally:
        _discard(draft)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yields the draft to write; it takes the place of `path` when the block ends well and is removed when it fails."""
    with drafting(path) as draft, failing(path):
        yield draft
        draft.replace(path)


def _discard(draft: Path) -> None:
    with suppress(OSError):  # the next process that writes this file removes it
        shutil.rmtree(draft) if draft.is_dir() else draft.unlink(missing_ok=True)


def _is_write_error(error: BaseException) -> bool:
    """OSError, and what torch and safetensors raise in its place."""
    if isinstance(error, OSError):
        return True
    return type(error).__name__ == "SafetensorError" or (
        isinstance(error, RuntimeError) and ("PytorchStreamWriter" in str(error) or "inline_container" in str(error))
    )


def write_error(path: Path, error: BaseException) -> RunError:
    """A failed write as one sentence with the remedy that fits it."""
    number = error.errno if isinstance(error, OSError) else None
    text = str(error)
    if number is None:  # pyarrow, torch and safetensors put the number into their text
        number = next((n for n in REMEDIES if os.strerror(n) in text or f"errno {n}" in text), None)
    reason = os.strerror(number) if number is not None else first_line(error)
    remedy = REMEDIES.get(number or 0, "make it writable or choose another directory, then repeat the command")
    return RunError(f"cannot write {path}: {reason}; {remedy}")


def require_writable(path: Path | None) -> None:
    """Refuse a file that cannot be written, before the work whose result it is to hold; None is no file."""
    if path is None:
        return
    with failing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_of(path)
        draft.touch()
        draft.unlink()


def write_text(path: Path, text: str) -> None:
    """Write a text file whole, and to the disk before it takes the old one's place."""
    with writing(path) as draft, draft.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- reading


@contextmanager
def reading(path: Path, remedy: str = "remove it and run its stage again") -> Iterator[None]:
    """Whatever fails inside becomes DataError: the file is damaged, and what to do about it."""
    try:
        yield
    except (DataError, RunError, KeyboardInterrupt, MemoryError, AssertionError):
        raise
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}; {remedy}") from error
    except PermissionError as error:
        raise DataError(f"{path} may not be read: {error.strerror}; change its permissions") from error
    except Exception as error:
        raise DataError(f"{path} is damaged and cannot be read ({first_line(error)}); {remedy}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its kind where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


# ---------------------------------------------------------------- telling apart


def digest(path: Path) -> str | None:
    """What a file or directory holds, in 16 letters; None where there is nothing.

    A directory's digest is over the names, sizes and contents of its files; drafts and hidden files do not count.
    """
    try:
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path))
            parts = [f"{file.relative_to(path)}:{file.stat().st_size}:{_file_digest(file)}" for file in files]
            return _short("\n".join(parts).encode("utf-8", "surrogateescape")) if parts else None
        return _file_digest(path) if path.is_file() else None
    except OSError:
        return None


def _is_hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts)


def _file_digest(path: Path) -> str:
    stat = path.stat()
    return _known_digest(str(path.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ino)


@functools.lru_cache(maxsize=4096)
def _known_digest(path: str, size: int, _mtime: int, _inode: int) -> str:
    """Computed once per process as long as size and time of the file stay."""
    found = hashlib.blake2b(str(size).encode(), digest_size=8)
    with open(path, "rb") as file:
        if size <= WHOLE_DIGEST_BYTES:
            while block := file.read(BLOCK_BYTES):
                found.update(block)
        else:
            for number in range(BLOCKS):
                file.seek(number * (size - BLOCK_BYTES) // (BLOCKS - 1))
                found.update(file.read(BLOCK_BYTES))
    return found.hexdigest()


def _short(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def digest_of_value(value: object) -> str:
    """The digest of plain values: settings, facts."""
    import json

    return _short(json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
