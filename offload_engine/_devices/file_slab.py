# SPDX-License-Identifier: Apache-2.0
"""Keeps the host tier in a file: its bytes are in the page cache, which does not count as memory of the process."""

from __future__ import annotations

import ctypes
import errno
import os
import tempfile
import weakref

MIN_FREE_BYTES = 1 << 20
"""A directory with less free space than one minimal slab is rejected at once."""


class FileSlab:
    """Owns one unlinked file of `nbytes`; its space goes back to the file system on `close`, or after a crash."""

    def __init__(self, directory: str, nbytes: int) -> None:
        """Reserve the file's space.

        Raises:
            MemoryError: if the file system has no room for `nbytes`, or no more files can be opened.
        """
        self.nbytes = nbytes
        self.directory = directory
        self._fd = _reserve(directory, nbytes)
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        self._close_fd.atexit = False  # the device closes its slabs then, after its copies

    def __repr__(self) -> str:
        return f"FileSlab({self.nbytes:,} bytes in {self.directory})"

    def write(self, address: int, offset: int, nbytes: int) -> None:
        """Copy `nbytes` of memory at `address` to `offset`; releases the GIL while it copies."""
        view = _memory(address, nbytes)
        done = 0
        while done < nbytes:  # one call moves at most 2 GiB - 4 KiB, and less on a signal
            count = os.pwrite(self._fd, view[done:], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"no byte could be written at offset {offset + done}")
            done += count

    def read(self, address: int, offset: int, nbytes: int) -> None:
        """Copy `nbytes` at `offset` to memory at `address`; releases the GIL while it copies."""
        view = _memory(address, nbytes)
        done = 0
        while done < nbytes:
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise OSError(errno.EIO, f"the file ends at offset {offset + done}, {nbytes - done} bytes early")
            done += count

    def close(self) -> None:
        self._fd = -1  # a late copy fails with EBADF instead of writing to a file with the same number
        self._close_fd()


def check_directory(path: str, need_bytes: int = MIN_FREE_BYTES) -> None:
    """Check that the host tier can live in `path`, by making (and dropping) a file there.

    Raises:
        FileNotFoundError: if it does not exist.
        NotADirectoryError: if it is not a directory.
        PermissionError: if it is not writable.
        OSError: if no file can be made in it for another reason.
        ValueError: if its file system has less than `need_bytes` free.
    """
    if not os.path.exists(path):
        raise FileNotFoundError(f"offload directory {path!r} does not exist: create it, or name another one")
    if not os.path.isdir(path):
        raise NotADirectoryError(f"offload directory {path!r} is not a directory: name a directory, or 'none'")
    try:
        os.close(_open_unlinked(path))
    except OSError as error:
        kind = PermissionError if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else OSError
        raise kind(
            f"offload directory {path!r} is not writable ({error.strerror}): change its permissions, "
            "or name another one"
        ) from error
    free = free_bytes(path)
    if free < need_bytes:
        raise ValueError(
            f"offload directory {path!r} is too full: {free:,} bytes free, {need_bytes:,} needed. "
            "Free some space, name another directory, or lower host_limit_bytes."
        )


def free_bytes(path: str) -> int:
    """Return the bytes that the file system of `path` has free for this user."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def _open_unlinked(directory: str) -> int:
    """Open an unlinked file for reading and writing; return its descriptor."""
    if hasattr(os, "O_TMPFILE"):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            # File systems and kernels without O_TMPFILE raise these.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    fd, path = tempfile.mkstemp(prefix="offload-", dir=directory)
    os.unlink(path)
    return fd


def _reserve(directory: str, nbytes: int) -> int:
    """Open an unlinked file with `nbytes` reserved, so that the disk cannot fill up during a copy."""
    free = free_bytes(directory)
    if free < nbytes:
        raise MemoryError(f"offload directory {directory!r} has no room for {nbytes:,} bytes: {free:,} free")
    fd = -1
    try:
        fd = _open_unlinked(directory)
        _allocate(fd, nbytes)
    except OSError as error:
        if fd >= 0:
            os.close(fd)
        raise MemoryError(f"offload directory {directory!r} gives no file of {nbytes:,} bytes: {error}") from error
    return fd


def _allocate(fd: int, nbytes: int) -> None:
    # If the file system cannot reserve, os.posix_fallocate writes a byte into every block. The bare call fails instead,
    # and a sparse file is used.
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "fallocate64"):
        if libc.fallocate64(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise OSError(code, os.strerror(code))
    os.ftruncate(fd, nbytes)


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
