"""Draws the panels of docs/operations/grafana-dashboard.json from a real server under load, by Prometheus.

    python -m perf.server.dashboard

Needs `prometheus` on PATH (of the distribution's package of that name). Three tenants send requests that come
and go for a while; then Prometheus answers each panel's queries, which are drawn as Grafana would show them.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.common.ports import free_port
from perf.common.report import ROOT
from perf.server.serve_process import Served, naiad_serve

from naiad.cli.argument_types import at_least
from naiad.errors import StartupError

_FILE = ROOT / "docs" / "operations" / "grafana-dashboard.json"
_PICTURE = ROOT / "docs" / "images" / "dashboard.png"
_SCRAPE_S, _STEP_S, _RATE_S = 1, 2, 15
_VARIABLES = {"$instance": ".*", "$model": ".*", "$__rate_interval": f"{_RATE_S}s", "$price_per_hour": "1"}
_COLUMNS = 4
_TENANTS = (("acme", 3, 48), ("globex", 2, 24), ("", 1, 96))
_PROMPT = "Tell me about the rivers of the north, the towns beside them and who lives there. "
_PATIENCE_S = 60

Series = tuple[str, list[float], list[float]]


def main(argv: Sequence[str] | None = None) -> int:
    """Load a server, ask Prometheus, and draw."""
    args = _parse(argv)
    program = shutil.which("prometheus")
    if program is None:
        raise StartupError("prometheus is not on PATH: install the distribution's package of this name")
    dashboard = json.loads(_FILE.read_text(encoding="utf-8"))
    with naiad_serve(("--model", args.model)) as server, _prometheus(program, server.metrics) as address:
        begin_s = time.time()
        _load(server, args.seconds)
        time.sleep(2 * _SCRAPE_S)
        rows = [
            (panel, [] if panel["type"] == "row" else _series(address, panel, begin_s))
            for panel in dashboard["panels"]
        ]
    empty = [panel["title"] for panel, series in rows if panel["type"] != "row" and not series]
    print("panels without data:", ", ".join(empty) or "none")
    print("picture:", _draw(rows))
    return 0


@contextlib.contextmanager
def _prometheus(program: str, target: str) -> Iterator[str]:
    """Run Prometheus, which scrapes the target; yield its address."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="naiad-prometheus-") as folder:
        config = Path(folder) / "prometheus.yml"
        config.write_text(
            f"global: {{scrape_interval: {_SCRAPE_S}s}}\n"
            f"scrape_configs: [{{job_name: naiad, static_configs: [{{targets: ['{target}']}}]}}]\n",
            encoding="utf-8",
        )
        options = (f"--config.file={config}", f"--storage.tsdb.path={folder}/data")
        listen = f"--web.listen-address=127.0.0.1:{port}"
        process = subprocess.Popen(
            (program, *options, listen), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_ready(address)
            yield address
        finally:
            process.terminate()
            process.wait()


def _wait_until_ready(address: str) -> None:
    give_up_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(f"{address}/-/ready"):
                return
        except (urllib.error.URLError, OSError):
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.2)


def _load(server: Served, seconds: float) -> None:
    """Have each tenant's clients send requests, with pauses, until the time is over."""
    end_s = time.monotonic() + seconds

    def client(tenant: str, number: int, num_tokens: int) -> None:
        draw = random.Random(f"{tenant} {number}")
        for turn in itertools.count():
            if time.monotonic() > end_s:
                return
            prompt = _PROMPT * draw.randint(1, 6) + f"Question {turn % 5}."
            body = {"text_input": prompt, "max_tokens": draw.randint(8, num_tokens), "cache_salt": tenant}
            request = urllib.request.Request(
                f"http://{server.http}/v2/models/text/generate",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request) as answer:
                answer.read()
            time.sleep(draw.expovariate(2))

    threads = [
        threading.Thread(target=client, args=(tenant, number, num_tokens))
        for tenant, num_clients, num_tokens in _TENANTS
        for number in range(num_clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _series(address: str, panel: Mapping[str, Any], begin_s: float) -> list[Series]:
    """The panel's lines: label, seconds since the begin, values."""
    found = []
    for target in panel["targets"]:
        expression = target["expr"]
        for name, value in _VARIABLES.items():
            expression = expression.replace(name, value)
        sent = {"query": expression, "start": begin_s + _RATE_S, "end": time.time(), "step": _STEP_S}
        with urllib.request.urlopen(f"{address}/api/v1/query_range?{urllib.parse.urlencode(sent)}") as answer:
            results = json.load(answer)["data"]["result"]
        for result in results:
            label = target["legendFormat"]
            for name, value in result["metric"].items():
                label = label.replace("{{" + name + "}}", value)
            # Prometheus leaves out a label without a value, such as that of requests without a tenant.
            label = re.sub(r"\{\{.*?\}\}", "(none)", label)
            points = [(at - begin_s, float(value)) for at, value in result["values"]]
            found.append((label, [at for at, _ in points], [value for _, value in points]))
    return found


def _draw(rows: Sequence[tuple[Mapping[str, Any], Sequence[Series]]]) -> str:
    """Draw the panels in order, with a heading for each row."""
    from matplotlib.figure import Figure

    groups: list[tuple[str, list[tuple[Mapping[str, Any], Sequence[Series]]]]] = []
    for panel, series in rows:
        if panel["type"] == "row":
            groups.append((panel["title"], []))
        else:
            groups[-1][1].append((panel, series))
    heights = [-(-len(panels) // _COLUMNS) for _, panels in groups]
    figure = Figure(figsize=(4 * _COLUMNS, 2.9 * sum(heights)), layout="constrained")
    subfigures = list(figure.subfigures(len(groups), 1, squeeze=False, height_ratios=heights).flat)
    for (title, panels), parts, height in zip(groups, subfigures, heights, strict=True):
        parts.suptitle(title, fontweight="bold", x=0.01, ha="left")
        for number, (panel, series) in enumerate(panels, 1):
            axes = parts.add_subplot(height, _COLUMNS, number)
            shown = [each for each in series if any(math.isfinite(value) and value for value in each[2])]
            for label, at_s, values in shown:
                axes.plot(at_s, values, label=label, linewidth=1)
            axes.set_title(panel["title"], fontsize=9)
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
            axes.grid(alpha=0.3)
            if shown:
                axes.legend(fontsize=6)
            else:
                axes.text(
                    0.5,
                    0.5,
                    "0" if any(0 in each[2] for each in series) else "no data",
                    transform=axes.transAxes,
                    ha="center",
                )
    figure.savefig(_PICTURE, dpi=80)
    return str(_PICTURE.relative_to(ROOT))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="perf.server.dashboard", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="default", help="default, DIR or org/name[@revision]")
    parser.add_argument("--seconds", type=at_least(20), default=90, metavar="N", help="of load")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
