from __future__ import annotations

import socket
from pathlib import Path

from naiad.cli.connections import num_connections
from naiad.cli.system_checks import free_port


def test_only_established_connections_to_the_ports_count(tmp_path: Path) -> None:
    (tmp_path / "tcp").write_text(
        "  sl  local_address rem_address   st tx_queue\n"
        "   0: 0100007F:1F40 00000000:0000 0A 0\n"
        "   1: 0100007F:1F40 0100007F:9C40 01 0\n"
        "   2: 0100007F:9C40 0100007F:1F40 01 0\n"
        "   3: 0100007F:1F40 0100007F:9C41 08 0\n"
        "   4: 0100007F:1F41 0100007F:9C42 01 0\n"
    )
    assert num_connections([8000], tmp_path) == 1
    assert num_connections([8000, 8001], tmp_path) == 2


def test_a_real_connection_is_seen() -> None:
    port = free_port("127.0.0.1")
    with socket.create_server(("127.0.0.1", port)):
        assert num_connections([port]) == 0
        with socket.create_connection(("127.0.0.1", port)):
            assert num_connections([port]) == 1
