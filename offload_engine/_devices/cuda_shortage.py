# SPDX-License-Identifier: Apache-2.0
"""`CudaShortages`: tells when torch's allocator of GPU memory is about to raise `torch.OutOfMemoryError`."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offload_engine._compat import torch_private

logger = logging.getLogger(__name__)


class CudaShortages:
    """Calls functions before each error of memory on one GPU, in the thread that allocates, whoever catches the error.

    torch keeps an observer for ever. So there is at most one for each object of this class, made when it is needed, and
    it keeps nothing alive.

    Args:
        index: of the GPU.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._listeners: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._is_expected = False

    def add(self, listener: Callable[[], None]) -> None:
        """Call a method at each shortage, as long as its object exists."""
        if not self._listeners:
            self._observe()
        self._listeners.append(weakref.WeakMethod(listener))

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Return a context manager in which a shortage is no news."""
        self._is_expected = True
        try:
            yield
        finally:
            self._is_expected = False

    def tell(self) -> None:
        """Call the methods, unless a shortage is expected. Never raises: that would take the place of torch's error."""
        for listener in () if self._is_expected else self._listeners:
            method = listener()
            try:
                if method is not None:
                    method()
            except Exception as error:
                logger.warning("a shortage of GPU memory could not be explained: %s", error)

    def _observe(self) -> None:
        this = weakref.ref(self)

        def observe(index: int, *_: int) -> None:
            shortages = this()
            if shortages is not None and shortages._index == index:
                shortages.tell()

        try:
            torch_private.cuda_observe_shortages(observe)
        except (ImportError, RuntimeError) as error:  # of other allocators, such as cudaMallocAsync
            logger.info("shortages of GPU memory are explained only where they are raised in a forward: %s", error)
