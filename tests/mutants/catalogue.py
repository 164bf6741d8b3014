"""All mutants, by name."""

from tests.mutants.admission import ADMISSION
from tests.mutants.adoptions import ADOPTIONS
from tests.mutants.backups import BACKUPS
from tests.mutants.bounds import BOUNDS
from tests.mutants.callers import CALLERS
from tests.mutants.clients import CLIENTS
from tests.mutants.clocks import CLOCKS
from tests.mutants.commits import COMMITS
from tests.mutants.conformance import CONFORMANCE
from tests.mutants.controllers import CONTROLLERS
from tests.mutants.copies import COPIES
from tests.mutants.damage import DAMAGE
from tests.mutants.deletions import DELETIONS
from tests.mutants.disk import DISK
from tests.mutants.elections import ELECTIONS
from tests.mutants.failovers import FAILOVERS
from tests.mutants.fences import FENCES
from tests.mutants.http2 import HTTP2
from tests.mutants.kafka import KAFKA
from tests.mutants.kafka_service import KAFKA_SERVICE
from tests.mutants.leases import LEASES
from tests.mutants.ledgers import LEDGERS
from tests.mutants.levels import LEVELS
from tests.mutants.membership import MEMBERSHIP
from tests.mutants.monitoring import MONITORING
from tests.mutants.object_logs import OBJECT_LOGS
from tests.mutants.offloads import OFFLOADS
from tests.mutants.operators import OPERATORS
from tests.mutants.outages import OUTAGES
from tests.mutants.overload import OVERLOAD
from tests.mutants.peers import PEERS
from tests.mutants.reads import READS
from tests.mutants.reconciling import RECONCILING
from tests.mutants.recovery import RECOVERY
from tests.mutants.replication import REPLICATION
from tests.mutants.rocketmq import ROCKETMQ
from tests.mutants.shapes import SHAPES
from tests.mutants.snapshots import SNAPSHOTS
from tests.mutants.starvation import STARVATION
from tests.mutants.state import STATE
from tests.mutants.turns import TURNS

_ALL = (
    *ELECTIONS,
    *REPLICATION,
    *SNAPSHOTS,
    *MEMBERSHIP,
    *LEVELS,
    *READS,
    *CONTROLLERS,
    *DISK,
    *STATE,
    *COMMITS,
    *PEERS,
    *CLIENTS,
    *CLOCKS,
    *MONITORING,
    *BACKUPS,
    *ADMISSION,
    *ADOPTIONS,
    *RECOVERY,
    *OUTAGES,
    *OVERLOAD,
    *STARVATION,
    *RECONCILING,
    *OBJECT_LOGS,
    *FAILOVERS,
    *BOUNDS,
    *DELETIONS,
    *DAMAGE,
    *FENCES,
    *ROCKETMQ,
    *SHAPES,
    *OFFLOADS,
    *LEDGERS,
    *COPIES,
    *CONFORMANCE,
    *KAFKA,
    *KAFKA_SERVICE,
    *CALLERS,
    *LEASES,
    *OPERATORS,
    *HTTP2,
    *TURNS,
)

MUTANTS = {mutant.name: mutant for mutant in _ALL}
"""The mutants in the order of their subjects."""

assert len(MUTANTS) == len(_ALL), "two mutants have one name"
