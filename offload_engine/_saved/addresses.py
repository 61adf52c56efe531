"""`AddressTable`: saved storages by the address of the storage they stand for."""

from __future__ import annotations

from offload_engine._saved.storage import SavedStorage


class AddressTable:
    """Finds the saved storage of a tensor that is saved once more.

    An entry stays as long as a tensor is left that could be saved under its address; `SavedStorage.pin_address` keeps
    the address from being given to another storage meanwhile.
    """

    def __init__(self) -> None:
        self._by_key: dict[int, SavedStorage] = {}

    def find(self, key: int) -> SavedStorage | None:
        """Return the storage saved last under this address."""
        return self._by_key.get(key)

    def add(self, saved: SavedStorage) -> None:
        """Enter a storage, in place of an earlier version of it."""
        self._by_key[saved.key] = saved

    def remove(self, saved: SavedStorage) -> None:
        """Remove a storage. No-op where another one has its address by now."""
        if self._by_key.get(saved.key) is saved:
            del self._by_key[saved.key]

    def pin(self, saved: SavedStorage) -> None:
        """Keep the address of a storage whose buffer is about to go, or remove it where no tensor is left."""
        if not saved.pin_address():
            self.remove(saved)
