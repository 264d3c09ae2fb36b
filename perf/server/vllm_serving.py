"""vLLM's OpenAI server on a CPU and its load generator `vllm bench serve`, as `make bench-peers` has them."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common.ports import free_port
from perf.common.report import ROOT
from perf.peers.environments import BUILD, variables

from naiad.errors import StartupError

_ADAPTERS = ROOT / "perf" / "peers" / "adapters"
_INTERPRETER = BUILD / "vllm" / "bin" / "python"
_PERCENTILES = (50, 95, 99)
# It compiles the model.
_START_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLoad:
    """What `vllm bench serve` asks a server for.

    Attributes:
        streams: requests at once.
        prompt_tokens, output_tokens: of each request.
        repeats: how often as many requests as streams are sent.
    """

    streams: int
    prompt_tokens: int
    output_tokens: int
    repeats: int


def is_installed() -> bool:
    """Whether `make bench-peers` has made the environment."""
    return _INTERPRETER.exists()


@contextmanager
def vllm_serve(model_dir: Path, threads: int, max_num_seqs: int, max_model_len: int) -> Iterator[str]:
    """Start vLLM's server in bfloat16, compiled, without a prefix cache; yield its HOST:PORT.

    Raises:
        StartupError: it ended, or does not serve in time; the message has its last lines.
    """
    port = free_port()
    options = {
        "--model": model_dir,
        "--served-model-name": model_dir.name,
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "bfloat16",
        "--max-num-seqs": max_num_seqs,
        "--max-model-len": max_model_len,
        # Of the machine's memory; vLLM's own choice leaves too little for anything else.
        "--gpu-memory-utilization": 0.4,
    }
    words = [str(word) for option in options.items() for word in option]
    command = [str(_INTERPRETER), str(_ADAPTERS / "run_vllm_server.py"), *words, "--no-enable-prefix-caching"]
    environment = variables("vllm", threads) | {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, range(threads))),
        # As in the adapter of vLLM's engine.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            _wait_until_it_serves(process, f"http://127.0.0.1:{port}/health")
            yield f"127.0.0.1:{port}"
        except StartupError as error:
            log.seek(0)
            raise StartupError(f"{error}: {log.read().decode(errors='replace')[-2000:]}") from None
        finally:
            process.terminate()
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def bench(address: str, model: str, model_dir: Path, load: BenchLoad) -> dict[str, Any]:
    """Run `vllm bench serve` against a server; return a row of figures, times in milliseconds.

    Args:
        address: the server's HOST:PORT.
        model: the name by which it serves the model.
        model_dir: the checkpoint, whose tokenizer the generator uses.
        load: what is asked for.

    Raises:
        RuntimeError: a request failed, or the generator did.
    """
    with tempfile.TemporaryDirectory(prefix="naiad-perf-") as folder:
        command = [str(_INTERPRETER), str(_ADAPTERS / "run_vllm_bench.py")]
        command += bench_options(address, model, model_dir, load, Path(folder))
        done = subprocess.run(command, env=variables("vllm", 1), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"vllm bench serve ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return bench_row(json.loads((Path(folder) / "report.json").read_text()), load)


def bench_options(address: str, model: str, model_dir: Path, load: BenchLoad, folder: Path) -> list[str]:
    """The options of `vllm bench serve`, which writes `report.json` into the folder."""
    options = {
        "--backend": "vllm",
        "--base-url": f"http://{address}",
        "--endpoint": "/v1/completions",
        "--model": model_dir,
        "--served-model-name": model,
        "--dataset-name": "random",
        "--input-len": load.prompt_tokens,
        "--output-len": load.output_tokens,
        "--num-prompts": load.streams * load.repeats,
        "--max-concurrency": load.streams,
        "--num-warmups": load.streams,
        "--temperature": 0,
        "--percentile-metrics": "ttft,itl",
        "--metric-percentiles": ",".join(map(str, _PERCENTILES)),
        "--result-dir": folder,
        "--result-filename": "report.json",
    }
    words = [str(word) for option in options.items() for word in option]
    return [*words, "--ignore-eos", "--save-result", "--disable-tqdm"]


def bench_row(report: Mapping[str, Any], load: BenchLoad) -> dict[str, Any]:
    """The figures of a report.

    Raises:
        RuntimeError: a request failed.
    """
    wanted = load.streams * load.repeats
    if report["completed"] != wanted:
        raise RuntimeError(f"vllm bench serve completed {report['completed']} of {wanted} requests")
    return {
        "streams": load.streams,
        "tokens/s": round(report["output_throughput"], 1),
        **{f"TTFT p{each}": round(report[f"p{each}_ttft_ms"], 2) for each in _PERCENTILES[:2]},
        **{f"gap p{each}": round(report[f"p{each}_itl_ms"], 2) for each in _PERCENTILES},
    }


def _wait_until_it_serves(process: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        try:
            urllib.request.urlopen(url, timeout=_POLL_S).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(_POLL_S)
        if process.poll() is not None or time.monotonic() > deadline_s:
            raise StartupError("vLLM's server does not serve")
