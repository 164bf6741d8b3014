"""docs/format.md lists the sections of a checkpoint as they are written, with their columns."""

import io
import re
from pathlib import Path

from streammeta.controller.features import SUPPORTED
from streammeta.controller.ids import ClusterId, EndOffset, Epoch, NodeId, SnapshotId
from streammeta.controller.metadata.cluster_metadata import ClusterMetadata
from streammeta.controller.quorum.voters import ReplicaKey, Voter, VoterSet
from streammeta.controller.runtime.interfaces import SnapshotPoint
from streammeta.controller.runtime.persistence.metadata_checkpoint import FrozenCheckpoint
from streammeta.controller.snapshot.checkpoint_file import CheckpointReader

PAGE = Path(__file__).resolve().parents[2] / "docs" / "format.md"
ARROW_NAMES = {"": "int64", "text": "string", "bytes": "binary"}


def documented() -> dict[str, list[tuple[str, str]]]:
    """Columns and Arrow types by section, as the table under "Sections" says."""
    table = PAGE.read_text().split("### Sections")[1].split("###")[0]
    return {
        name: [
            (column, ARROW_NAMES.get(kind, kind))
            for column, kind in re.findall(r"`(\w+)`(?: (text|bytes|int8|int32|bool))?", columns)
        ]
        for name, columns in re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", table, re.M)
    }


def test_the_page_lists_every_section_and_column_in_order() -> None:
    voters = VoterSet((Voter(ReplicaKey(NodeId(1)), "h:2", "h:1"),))
    point = SnapshotPoint(SnapshotId(EndOffset(0), Epoch(0)), ClusterId("c"), voters)
    recovering = ClusterMetadata()
    recovering._feature_level.load(SUPPORTED.highest)
    recovering._recovery.load(0, 1)
    file = io.BytesIO()
    FrozenCheckpoint(point, recovering.freeze(), bytes(16)).write(file)
    reader = CheckpointReader(file)
    written = {
        section: [(field.name, str(field.type)) for field in reader.table(section).schema]
        for section in reader.entries
    }
    assert documented() == written
    assert list(documented()) == list(written)
