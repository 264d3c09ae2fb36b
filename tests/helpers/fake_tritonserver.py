"""A stand-in for tritonserver: `fake_tritonserver.py HTTP_PORT BEHAVIOUR…`; knows no models.

Behaviours: fail (prints an error and ends), deaf (ignores SIGTERM), slow-exit, crash-once PATH
(ends when PATH can be made), child PATH (starts a process that outlives it; its id goes to PATH),
shm NAME (maps that file of /dev/shm), busy-until PATH (has an active request until PATH is there),
busy-for-ever.
"""

from __future__ import annotations

import http.server
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

FAILURE = (
    'E1121 06:03:04.281119 13958 backend_model.cc:692] "ERROR: Failed to create instance: '
    "TritonModelException: dtype = 'int3': expected one of auto\\n\\nAt:\\n  model.py(36): initialize\\n\""
)


class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f'nv_trt_llm_request_metrics{{request_type="active"}} {int(is_busy())}\n'.encode())

    def log_message(self, *_: object) -> None:  # type: ignore[override]
        """Quiet."""


def is_busy() -> bool:
    words = sys.argv[2:]
    if "busy-until" in words:
        return not Path(words[words.index("busy-until") + 1]).exists()
    return "busy-for-ever" in words


def main() -> None:
    port, words = int(sys.argv[1]), sys.argv[2:]
    if "fail" in words:
        print(FAILURE, file=sys.stderr)
        print("error: creating server: Internal - failed to load all models", file=sys.stderr)
        sys.exit(1)
    if "deaf" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "slow-exit" in words:
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), print("drained", flush=True), os._exit(0)))
    elif "deaf" not in words:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    if "child" in words:
        child = subprocess.Popen(["sleep", "600"])
        Path(words[words.index("child") + 1]).write_text(str(child.pid))
    if "shm" in words:
        with open(f"/dev/shm/{words[words.index('shm') + 1]}", "w+b") as file:
            file.truncate(4096)
            region = mmap.mmap(file.fileno(), 4096)
            assert len(region) == 4096
    server = http.server.HTTPServer(("127.0.0.1", port), Ready)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    if "crash-once" in words:
        flag = Path(words[words.index("crash-once") + 1])
        if not flag.exists():
            flag.touch()
            time.sleep(1)
            os._exit(3)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main()
