"""A stand-in for tritonserver without models: `fake_tritonserver.py HTTP_PORT BEHAVIOUR…`.

Behaviours: fail (prints an error and exits), silent (exits), killed (by SIGKILL), deaf (ignores SIGTERM),
slow-exit, crash-once PATH (exits if PATH can be created, else creates PATH.again once signals are
handled), unready PATH (is not ready if PATH exists), absent PATH (does not listen if PATH exists),
starts-for-ever (is never ready), dead-stub DIR (is never ready; a stub of it has ended), gone-stub DIR
(the same, and it has taken note of the end), child PATH (starts a process that outlives it and writes its
id to PATH), shm NAME (maps that file of /dev/shm), busy-until PATH (has an active request until PATH
exists), busy-for-ever, mute-until PATH (has no metrics until PATH exists), engine PATH (has an engine
that writes the messages it receives to PATH), chatty PATH (when it is asked whether it lives, prints more
than a pipe holds and then creates PATH).
"""

from __future__ import annotations

import http.server
import mmap
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from naiad.engine_process import runtime_directory

FAILURE = (
    'E1121 06:03:04.281119 13958 backend_model.cc:692] "ERROR: Failed to create instance: '
    "TritonModelException: dtype = 'int3': expected one of auto\\n\\nAt:\\n  model.py(36): initialize\\n\""
)
NEVER_READY = {"starts-for-ever", "dead-stub", "gone-stub"}


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/v2/health/live" and "chatty" in sys.argv:
            print("\n".join(["a line of the server" * 5] * 2000), flush=True)
            Path(sys.argv[sys.argv.index("chatty") + 1]).touch()
        is_down = self.path == "/v2/health/ready" and not NEVER_READY.isdisjoint(sys.argv)
        refuses = is_mute() if self.path == "/metrics" else IS_UNREADY or is_down
        self.send_response(503 if refuses else 200)
        self.end_headers()
        self.wfile.write(f'nv_trt_llm_request_metrics{{request_type="active"}} {int(is_busy())}\n'.encode())

    def log_message(self, *_: object) -> None:  # type: ignore[override]
        """Quiet."""


def is_busy() -> bool:
    words = sys.argv[2:]
    if "busy-until" in words:
        return not Path(words[words.index("busy-until") + 1]).exists()
    return "busy-for-ever" in words


def has_flag(behaviour: str) -> bool:
    words = sys.argv[2:]
    return behaviour in words and Path(words[words.index(behaviour) + 1]).exists()


IS_UNREADY = has_flag("unready")


def is_mute() -> bool:
    words = sys.argv[2:]
    return "mute-until" in words and not Path(words[words.index("mute-until") + 1]).exists()


def listen_as_engine(record: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(runtime_directory(os.getpid()) / "llm.engine"))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        record.write_bytes(connection.recv(4096))
        connection.recv(1)

    threading.Thread(target=serve, daemon=True).start()


def map_shared(name: str) -> mmap.mmap:
    with open(f"/dev/shm/{name}", "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


def end_a_stub(folder: Path, *, is_noticed: bool) -> None:
    stub = folder / "triton_python_backend_stub"
    stub.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(stub), "1.5"])
    if is_noticed:
        process.wait()


def prepare(words: list[str]) -> mmap.mmap | None:
    """Start what belongs to the server; the returned region is mapped as long as it is referenced."""
    if "child" in words:
        child = subprocess.Popen(["sleep", "600"])
        Path(words[words.index("child") + 1]).write_text(str(child.pid))
    for behaviour in ("dead-stub", "gone-stub"):
        if behaviour in words:
            folder = Path(words[words.index(behaviour) + 1])
            end_a_stub(folder, is_noticed=behaviour == "gone-stub")
    if "engine" in words:
        listen_as_engine(Path(words[words.index("engine") + 1]))
    if "shm" in words:
        return map_shared(words[words.index("shm") + 1])
    return None


def _end_at_once(words: list[str]) -> None:
    """Do so, if that is the behaviour."""
    if "fail" in words:
        print(FAILURE, file=sys.stderr)
        print("something else", file=sys.stderr)
        print("error: creating server: Internal - failed to load all models", file=sys.stderr)
    if "fail" in words or "silent" in words:
        sys.exit(1)
    if "killed" in words:
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    port, words = int(sys.argv[1]), sys.argv[2:]
    _end_at_once(words)
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "slow-exit" in words:
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("drained", flush=True), os._exit(0)))
    elif "deaf" not in words:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    region = prepare(words)
    if not has_flag("absent"):
        server = http.server.HTTPServer(("127.0.0.1", port), Ready)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    if "crash-once" in words:
        flag = Path(words[words.index("crash-once") + 1])
        if not flag.exists():
            flag.touch()
            time.sleep(1)
            os._exit(3)
        flag.with_suffix(".again").touch()
    while region is None or not region.closed:
        time.sleep(60)


if __name__ == "__main__":
    main()
