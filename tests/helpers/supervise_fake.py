"""`supervise_fake.py HTTP_PORT RUNTIME_DIR BEHAVIOUR…`: runs the supervisor with the fake server.

With the behaviour `short` or `busy-for-ever` requests get one second to finish. With `delay` they are taken
for a second more. With `dead-model` every probe is answered with the error of a model whose process has died.
With `beside` a fake server with models runs beside it. With `crash-once` a line tells when a command is made.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from naiad.cli.serve import drain, start_watch, supervisor
from naiad.cli.serve.probes import ProbeFailure
from naiad.cli.serve.side_process import SidePlan
from naiad.cli.serve.stop_signal import StopSignal
from naiad.errors import StartupError


def main() -> int:
    port, runtime_dir, *words = sys.argv[1:]
    command = [sys.executable, str(Path(__file__).with_name("fake_tritonserver.py")), port, *words]

    def make_command() -> list[str]:
        if "crash-once" in words:
            print("making the command", flush=True)
        return command

    plan = supervisor.ServerPlan(
        command=make_command,
        environment=dict(os.environ),
        runtime_dir=Path(runtime_dir),
        models=[],
        http_address=f"127.0.0.1:{port}",
        grpc_address="127.0.0.1:1",
        metrics_address=f"127.0.0.1:{port}",
        start_timeout_s=3 if "starts-for-ever" in words else 600,
        exit_timeout_s=20 if {"busy-for-ever", "short"}.isdisjoint(words) else 1,
        shutdown_delay_s=1 if "delay" in words else 0,
        is_verbose=False,
        beside=[_beside()] if "beside" in words else [],
    )
    supervisor.SERVER_EXIT_TIMEOUT_S, supervisor._STOP_MARGIN_S, drain._END_MARGIN_S = 1, 1.0, 1.0
    start_watch.DEAD_STUB_S = 2.0
    if "dead-model" in words:
        dead = ProbeFailure("llm: Stub process 'llm_0_0' is not healthy.", is_silence=False)
        supervisor.Prober.probe = lambda self: dead  # type: ignore[method-assign]
    try:
        with StopSignal() as stop:
            return supervisor.Supervisor(plan, stop, lambda: print("ready", flush=True)).run()
    except StartupError as error:
        print(f"naiad: error: {error}", flush=True)
        return 1


def _beside() -> SidePlan:
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    return SidePlan(
        name="the server beside it",
        module="helpers.fake_side_server",
        host="127.0.0.1",
        port=port,
        options=(str(port),),
        has_models=True,
    )


if __name__ == "__main__":
    sys.exit(main())
