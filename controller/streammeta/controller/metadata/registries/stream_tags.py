"""Registry of the tags of streams, and their look-up.

The index is derived from the tags. It is not part of a snapshot, and is built when one is loaded.
"""

import sys
from collections.abc import Mapping

from streammeta.controller.metadata.tables.shared_views import SharedDict, SharedDictView
from streammeta.controller.metadata.tables.tables import Undo
from streammeta.controller.metadata.tables.tag_index import TagIndex
from streammeta.controller.metadata.tables.values import Int64Column, Tags, column

EXAMINED_MAX = 4_096
"""Maximum number of streams that a page of a look-up examines."""


class StreamTags:
    """Tags by stream id. Texts are interned, since many streams share keys and values."""

    def __init__(self) -> None:
        self._tags: SharedDict[int, tuple[str, ...]] = SharedDict()
        self._index = TagIndex()
        self._characters = 0

    def __contains__(self, stream_id: int) -> bool:
        return stream_id in self._tags

    @property
    def characters(self) -> int:
        """Number of characters in all tags."""
        return self._characters

    def of_stream(self, stream_id: int) -> Tags:
        """Return a stream's tags, sorted by key."""
        flat = self._tags.get(stream_id) or ()
        return tuple(zip(flat[::2], flat[1::2], strict=True))

    def page(self, tags: Tags, first: int, size: int) -> tuple[Int64Column, int]:
        """Return the first `size` streams with all these tags, from the id `first` on.

        Also returns the id where the next page begins, or -1. A page whose tags many streams have,
        but never together, ends after `EXAMINED_MAX` streams.
        """
        wanted = set(tags)
        found: list[int] = []

        for examined, stream_id in enumerate(self._index.find(tags, first)):
            if examined == EXAMINED_MAX:
                return column(found), stream_id
            # The index contains streams whose tags only have the same checksum.
            if wanted.issubset(self.of_stream(stream_id)):
                if len(found) == size:
                    return column(found), stream_id
                found.append(stream_id)

        return column(found), -1

    def view(self) -> SharedDictView[int, tuple[str, ...]]:
        """Return an immutable view of the flattened tags."""
        return self._tags.view()

    def load(self, tags: Mapping[int, tuple[str, ...]]) -> None:
        """Fill an empty registry with flattened tags."""
        self._tags.load((owner, tuple(map(sys.intern, texts))) for owner, texts in tags.items())
        self._index.load(tags.items())
        self._characters = sum(len(text) for texts in tags.values() for text in texts)

    def set(self, stream_id: int, tags: Tags, undo: Undo) -> None:
        """Set the tags of a stream without tags."""
        if not tags:
            return
        texts = tuple(sys.intern(text) for tag in tags for text in tag)
        self._put(stream_id, texts)
        undo.append(lambda: self._remove(stream_id, texts))

    def drop(self, stream_id: int, undo: Undo) -> None:
        """Remove the tags of a stream, if it has any."""
        texts = self._tags.get(stream_id)
        if texts is not None:
            self._remove(stream_id, texts)
            undo.append(lambda: self._put(stream_id, texts))

    def _put(self, stream_id: int, texts: tuple[str, ...]) -> None:
        self._tags[stream_id] = texts
        self._index.add(stream_id, texts)
        self._characters += sum(map(len, texts))

    def _remove(self, stream_id: int, texts: tuple[str, ...]) -> None:
        self._tags.pop(stream_id)
        self._index.remove(stream_id, texts)
        self._characters -= sum(map(len, texts))
