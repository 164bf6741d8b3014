"""How gRPC is set up here: sizes, reconnecting, and what connections are shared.

Values alone; who makes servers and channels takes them from here.
"""

REQUEST_BYTES_MAX = 16 << 20
"""Largest request that a controller takes, from peers and clients alike."""

ANSWER_BYTES_MAX = 64 << 20
"""Largest answer: room for a Fetch of 8 MiB, or one batch that is larger, with all framing."""

SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", REQUEST_BYTES_MAX),
    ("grpc.max_send_message_length", ANSWER_BYTES_MAX),
    # Two servers must not share a port unnoticed.
    ("grpc.so_reuseport", 0),
    # Clients find hosts that vanished by pings; gRPC takes frequent ones for an attack unless told.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)

_PEER_OPTIONS = (
    ("grpc.max_receive_message_length", ANSWER_BYTES_MAX),
    ("grpc.max_send_message_length", REQUEST_BYTES_MAX),
    # A peer that restarts must be found again well within an election timeout.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # A restarted container may have another address under the same name.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    ("grpc.enable_retries", 0),
    # Controllers are neighbours: a proxy meant for the internet only gets in the way.
    ("grpc.enable_http_proxy", 0),
    # Channels with equal options share a connection otherwise; bulk and control must not.
    ("grpc.use_local_subchannel_pool", 1),
)

_BULK_IDLE_MS = 60_000


def control_options(connect_timeout_ms: int) -> list[tuple[str, int]]:
    """Return the options of a channel to a peer for all but snapshots."""
    # Despite its name the option bounds one attempt to connect; a host that is gone is silent.
    return [*_PEER_OPTIONS, ("grpc.min_reconnect_backoff_ms", connect_timeout_ms)]


def bulk_options(connect_timeout_ms: int) -> list[tuple[str, int]]:
    """Return the options of a channel for snapshots; it disconnects when it is idle."""
    return [*control_options(connect_timeout_ms), ("grpc.client_idle_timeout_ms", _BULK_IDLE_MS)]
