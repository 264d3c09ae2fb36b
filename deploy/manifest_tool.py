"""Renders the chart and checks manifests; run by the interpreter of an environment that has Helm's engine.

It reads a request as JSON from standard input and writes the answer as JSON to standard output. It imports
nothing of Naiad but its neighbour `custom_kinds`. `deploy.manifests` runs it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import yaml
from custom_kinds import CUSTOM_KINDS

Document = dict[str, Any]


def main() -> None:
    """Answer one request: manifests in YAML as `text`, or what `chart` makes of `values`, in YAML too."""
    asked = json.load(sys.stdin)
    documents, lint = [], []
    try:
        if "text" in asked:
            documents = _read(asked["text"])
        else:
            values = yaml.safe_load(asked["values"]) or {}
            chart = helm_python.Chart.load(asked["chart"])
            chart.validate_schema(values)
            rendered = chart.render(values, name=asked["name"], namespace=asked["namespace"])
            documents = [
                each for path, text in rendered.items() if path.endswith(".yaml") for each in _read(text)
            ]
            lint = helm_python.lint(asked["chart"], values, strict=True)["errors"]
    except helm_python.HelmError as error:
        json.dump({"error": str(error)}, sys.stdout)
        return
    problems = [problem for each in documents for problem in _problems(each, asked["version"])]
    answer = {
        "documents": documents,
        "text": yaml.safe_dump_all(documents, sort_keys=False),
        "problems": [*map(str, lint), *problems],
    }
    json.dump(answer, sys.stdout)


def _read(text: str) -> list[Document]:
    return [document for document in yaml.safe_load_all(text) if document]


def _problems(document: Document, version: str) -> Iterator[str]:
    """What is wrong with a manifest; a custom resource's containers and volumes are checked as a Pod's."""
    kind = document.get("apiVersion", ""), document.get("kind", "")
    name = f"{kind[1]} {document.get('metadata', {}).get('name')}"
    if kind not in CUSTOM_KINDS:
        yield from (f"{name}: {problem}" for problem in _kubernetes_problems(document, version))
        return
    for fault in jsonschema.Draft7Validator(CUSTOM_KINDS[kind]).iter_errors(document):
        yield f"{name}: {fault.json_path}: {fault.message}"
    spec = document.get("spec", {})
    if "containers" in spec:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "part"},
            "spec": {part: spec[part] for part in ("containers", "volumes") if part in spec},
        }
        yield from (f"{name}: {problem}" for problem in _kubernetes_problems(pod, version))


def _kubernetes_problems(document: Document, version: str) -> Iterator[str]:
    try:
        kubernetes_validate.validate(document, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        yield f"{error.path}: {error.message}"
    except kubernetes_validate.SchemaNotFoundError:
        yield f"Kubernetes {version} has no such kind"


if __name__ == "__main__":
    main()
