"""The Helm chart and KServe's manifests, made by Helm's engine and checked against Kubernetes' schemas."""

from __future__ import annotations

import argparse
import json
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from deploy.manifests import CHART, VERSIONS, check, interpreter, render
from perf.common.report import ROOT

from naiad.cli.serve.options import add_arguments
from naiad.errors import StartupError
from naiad.openai_server.access.key_file import read_key_file

pytestmark = pytest.mark.deploy

IMAGE = {"repository": "registry.example.com/naiad", "tag": "0.1.0"}
KEYS = {"existingSecret": "naiad-keys", "operatorSecret": "naiad-operator"}
VOLUME = {"source": {"claim": "models", "path": "SmolLM2-135M-Instruct"}}
HUB = {"source": {"hub": "org/name", "revision": "abc", "tokenSecret": "hub"}}
Documents = list[dict[str, Any]]


@pytest.fixture(scope="module", autouse=True)
def helm() -> None:
    """Helm's engine; without it all tests are skipped."""
    try:
        interpreter()
    except StartupError as error:
        pytest.skip(str(error))


def rendered(version: str = VERSIONS[-1], values: dict[str, Any] | None = None, **model: Any) -> Documents:
    """The manifests of one model, "m", which must be right."""
    given = {"image": IMAGE, "keys": KEYS, "models": {"m": VOLUME | model}} | (values or {})
    checked = render(json.dumps(given), namespace="prod", version=version)
    assert checked.problems == []
    return checked.documents


def models(**settings: Any) -> dict[str, Any]:
    return {"models": {"m": VOLUME | settings}}


def one(documents: Documents, kind: str) -> dict[str, Any]:
    (found,) = (each for each in documents if each["kind"] == kind)
    return found


def pod_of(documents: Documents) -> dict[str, Any]:
    spec: dict[str, Any] = one(documents, "Deployment")["spec"]["template"]["spec"]
    return spec


def args_of(documents: Documents) -> list[str]:
    (container,) = pod_of(documents)["containers"]
    assert container["command"] == ["naiad", "serve"]
    return [str(word) for word in container["args"]]


def limits_of(documents: Documents) -> dict[str, Any]:
    (container,) = pod_of(documents)["containers"]
    limits: dict[str, Any] = container["resources"]["limits"]
    return limits


def parsed(words: list[str]) -> argparse.Namespace:
    """The options as `naiad serve` reads them; an unknown one ends the test."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    add_arguments(parser)
    args, rest = parser.parse_known_args(words)
    assert rest == []
    return args


@pytest.mark.parametrize("version", VERSIONS)
def test_everything_at_once_is_valid(version: str) -> None:
    documents = rendered(
        version,
        values={
            "metrics": {"serviceMonitor": {"enabled": True}},
            "models": {
                "small": VOLUME | {"autoscaling": {"kind": "keda"}},
                "large": HUB
                | {
                    "device": "cuda",
                    "gpus": 4,
                    "tensorParallelSize": 2,
                    "pipelineParallelSize": 2,
                    "autoscaling": {"kind": "hpa"},
                    "deepHealth": True,
                    "exposeTriton": True,
                    "headless": True,
                    "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}},
                    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
                    "nodeSelector": {"gpu": "h100"},
                    "affinity": {"podAntiAffinity": {}},
                    "priorityClassName": "high",
                    "runtimeClassName": "nvidia",
                    "podLabels": {"team": "a"},
                    "podAnnotations": {"note": "b"},
                },
            },
        },
    )
    kinds = sorted(each["kind"] for each in documents)
    assert kinds == sorted(
        ["Deployment", "NetworkPolicy", "PodDisruptionBudget", "Service"] * 2
        + ["HorizontalPodAutoscaler", "InferencePool", "ScaledObject", "ServiceMonitor"]
    )


def test_options_are_those_of_naiad_serve() -> None:
    words = args_of(
        rendered(
            **HUB,
            device="cuda",
            tensorParallelSize=2,
            pipelineParallelSize=3,
            servedName="chat",
            exposeTriton=True,
            otlpEndpoint="http://collector:4318",
            allowedHosts=["llm.example.com"],
            args=["--max-num-seqs", "32"],
        )
    )
    args = parsed(words)
    assert args.model == "/models/m"
    assert (args.device, args.served_name) == ("cuda", "chat")
    assert (args.tensor_parallel_size, args.pipeline_parallel_size) == (2, 3)
    assert (args.openai_host, args.openai_port, args.host, args.expose_triton) == (
        *("0.0.0.0", 9000, "0.0.0.0"),
        True,
    )
    names = ["llm-m", "llm-m.prod", "llm-m.prod.svc", "llm-m.prod.svc.cluster.local", "llm.example.com"]
    assert args.openai_allowed_host == args.gate_allowed_host == names
    assert (args.max_num_seqs, args.log_format, args.metrics_open) == (32, "json", True)
    assert str(args.api_keys) == "/etc/naiad/keys/keys.json"


def test_long_names_stay_different() -> None:
    names = [f"{'m' * 30}-{letter}" for letter in "ab"]
    given = {"image": IMAGE, "keys": KEYS, "models": dict.fromkeys(names, VOLUME)}
    checked = render(json.dumps(given), name="r" * 53)
    assert checked.problems == []
    services = [each["metadata"]["name"] for each in checked.documents if each["kind"] == "Service"]
    assert len(set(services)) == 2
    assert all(len(each) <= 63 for each in services)


def test_triton_stays_on_loopback_unless_asked() -> None:
    documents = rendered()
    assert parsed(args_of(documents)).host == "127.0.0.1"
    assert [port["name"] for port in one(documents, "Service")["spec"]["ports"]] == ["openai"]
    exposed = one(rendered(exposeTriton=True), "Service")["spec"]["ports"]
    assert [port["name"] for port in exposed] == ["openai", "http", "grpc"]


def test_a_pod_outlives_its_drain() -> None:
    documents = rendered(exitSeconds=300, preStopSeconds=20)
    (container,) = pod_of(documents)["containers"]
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    drain = parsed(args_of(documents)).exit_timeout_s
    assert (pause, drain) == (20, 300)
    assert pod_of(documents)["terminationGracePeriodSeconds"] >= pause + drain + 15


def test_a_pod_is_hardened() -> None:
    pod = pod_of(rendered(**HUB))
    assert pod["automountServiceAccountToken"] is False
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 1000)
    for container in (*pod["initContainers"], *pod["containers"]):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}
    mounts = {mount["mountPath"]: mount for mount in pod["containers"][0]["volumeMounts"]}
    assert {path for path, mount in mounts.items() if not mount.get("readOnly")} == {
        "/dev/shm",
        "/tmp",
        "/cache",
    }
    # `naiad serve` refuses keys that others than their owner may write.
    mode = volumes["keys"]["secret"]["defaultMode"]
    assert not mode & (stat.S_IWGRP | stat.S_IWOTH | stat.S_IRWXO)


def test_probes_ask_for_health() -> None:
    (container,) = pod_of(rendered(startSeconds=600))["containers"]
    startup, readiness = container["startupProbe"], container["readinessProbe"]
    assert startup["httpGet"] == readiness["httpGet"] == {"path": "/health", "port": "openai"}
    assert startup["periodSeconds"] * startup["failureThreshold"] == 600
    assert container["livenessProbe"]["tcpSocket"] == {"port": "openai"}
    (deep,) = pod_of(rendered(deepHealth=True))["containers"]
    script = deep["livenessProbe"]["exec"]["command"][2]
    compile(script, "probe", "exec")
    assert "/health/deep" in script
    paths = [mount["mountPath"] for mount in deep["volumeMounts"]]
    assert "/etc/naiad/operator" in paths


def test_a_model_comes_from_a_volume_or_the_hub() -> None:
    volume = pod_of(rendered())
    assert "initContainers" not in volume
    assert volume["volumes"][0]["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    hub = pod_of(rendered(**HUB))
    (fetch,) = hub["initContainers"]
    assert fetch["command"] == [
        *("hf", "download", "org/name", "--local-dir", "/models/m", "--revision", "abc"),
    ]
    assert fetch["env"][1]["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}


def test_every_process_of_a_model_gets_a_gpu() -> None:
    split = {"tensorParallelSize": 2, "pipelineParallelSize": 3}
    for settings, num_gpus in (
        ({"device": "cuda"}, 1),
        ({"device": "cuda", **split}, 6),
        ({"device": "cuda", **split, "gpus": 6}, 6),
        ({"device": "cuda", **split, "resources": {"limits": {"nvidia.com/gpu": 6}}}, 6),
        (split, None),
    ):
        documents = rendered(**settings)
        args, limits = parsed(args_of(documents)), limits_of(documents)
        assert limits.pop("nvidia.com/gpu", None) == num_gpus
        assert limits == {"memory": "8Gi"}
        sizes = args.tensor_parallel_size, args.pipeline_parallel_size
        # An option that has its default is left out.
        assert sizes == ((2, 3) if "tensorParallelSize" in settings else (None, None))


def test_a_split_changes_nothing_else_of_a_pod() -> None:
    whole = pod_of(rendered(device="cuda"))
    parts = pod_of(rendered(device="cuda", tensorParallelSize=2, pipelineParallelSize=2))
    for pod in (whole, parts):
        pod["containers"][0].pop("resources")
    added = ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "2"]
    words = parts["containers"][0]["args"]
    place = words.index(added[0])
    assert words[place : place + 4] == added
    del words[place : place + 4]
    assert parts == whole


def test_replicas_follow_the_queue_and_the_cache() -> None:
    assert "replicas" in one(rendered(), "Deployment")["spec"]
    documents = rendered(autoscaling={"kind": "hpa", "waiting": 3, "kvCacheUsage": 0.75})
    assert "replicas" not in one(documents, "Deployment")["spec"]
    metrics = [each["pods"] for each in one(documents, "HorizontalPodAutoscaler")["spec"]["metrics"]]
    assert [(each["metric"]["name"], each["target"]["averageValue"]) for each in metrics] == [
        ("vllm_num_requests_waiting", "3"),
        ("vllm_kv_cache_usage_perc", "750m"),
    ]
    scaled = one(rendered(autoscaling={"kind": "keda", "waiting": 3}), "ScaledObject")["spec"]
    queries = [each["metadata"]["query"] for each in scaled["triggers"]]
    assert queries[0] == 'sum(vllm:num_requests_waiting{namespace="prod",service="llm-m"})'


def test_metrics_that_are_named_exist() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "backend_src").rglob("*.py"))
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    named = set(re.findall(r"vllm[:_](\w+)", templates))
    assert named == {"num_requests_waiting", "kv_cache_usage_perc"}
    assert all(f"vllm:{name}" in sources for name in named)


def test_the_network_lets_in_whom_it_should() -> None:
    policy = one(rendered(), "NetworkPolicy")["spec"]
    assert policy["ingress"] == [{"from": [{"podSelector": {}}], "ports": [{"port": "openai"}]}]
    assert policy["egress"] == []
    hub = one(rendered(**HUB), "NetworkPolicy")["spec"]
    assert [rule["ports"][0]["port"] for rule in hub["egress"]] == [53, 443]
    gateway = {"namespaceSelector": {"matchLabels": {"name": "gateway"}}}
    documents = rendered(values={"networkPolicy": {"from": [gateway]}})
    assert one(documents, "NetworkPolicy")["spec"]["ingress"][0]["from"] == [gateway]
    kinds = {each["kind"] for each in rendered(values={"networkPolicy": {"enabled": False}})}
    assert kinds == {"Deployment", "Service", "PodDisruptionBudget"}


def test_keys_can_be_the_charts_own(tmp_path: Path) -> None:
    entries = [{"name": "alice", "sha256": "0" * 64, "tenant": "a", "role": "operator"}]
    documents = rendered(values={"keys": {"entries": entries}})
    secret = one(documents, "Secret")
    key_file = tmp_path / "keys.json"
    key_file.write_text(secret["stringData"]["keys.json"], encoding="utf-8")
    key_file.chmod(0o600)
    (key,) = read_key_file(key_file)
    assert (key.name, key.tenant, key.role) == ("alice", "a", "operator")
    volumes = {volume["name"]: volume for volume in pod_of(documents)["volumes"]}
    assert volumes["keys"]["secret"]["secretName"] == secret["metadata"]["name"]


def test_prometheus_sends_a_key_where_one_is_needed() -> None:
    (endpoint,) = one(rendered(values={"metrics": {"serviceMonitor": {"enabled": True}}}), "ServiceMonitor")[
        "spec"
    ]["endpoints"]
    assert endpoint == {"port": "openai", "path": "/metrics", "interval": "10s"}
    closed = {"metrics": {"open": False, "serviceMonitor": {"enabled": True}}}
    documents = rendered(values=closed)
    assert parsed(args_of(documents)).metrics_open is False
    (endpoint,) = one(documents, "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"] == {"credentials": {"name": "naiad-operator", "key": "key"}}


def test_a_pool_selects_the_pods() -> None:
    picker = {"enabled": True, "endpointPicker": {"name": "picker", "port": 9002}}
    documents = rendered(inferencePool=picker)
    pool = one(documents, "InferencePool")["spec"]
    labels = one(documents, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pool["selector"]["matchLabels"].items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == "vllm"
    assert pool["targetPorts"] == [{"number": parsed(args_of(documents)).openai_port}]


def test_a_setting_can_be_turned_off_for_a_model() -> None:
    kinds = {each["kind"] for each in rendered(disruptionBudget={"enabled": False})}
    assert "PodDisruptionBudget" not in kinds


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"image": {"repository": ""}}, "repository"),
        ({"image": {"repository": "a", "tag": ""}}, "image.tag and image.digest"),
        ({"keys": {}}, "existingSecret or entries"),
        ({"models": {}}, "minProperties"),
        ({"models": {"m": {}}}, "models.m.source: name either claim or hub"),
        ({"models": {"m": {"source": {"claim": "a"}}}}, "models.m.source.path is empty"),
        ({"models": {"m": VOLUME | {"device": "tpu"}}}, "device"),
        ({"models": {"m": VOLUME | {"replica": 3}}}, "replica"),
        ({"keys": {"existingSecret": "a"}, "models": {"m": VOLUME | {"deepHealth": True}}}, "operatorSecret"),
        ({"models": {"m": VOLUME | {"inferencePool": {"enabled": True}}}}, "endpointPicker.name is empty"),
        (
            {"models": {"m": VOLUME | {"autoscaling": {"kind": "hpa", "minReplicas": 9}}}},
            "minReplicas is above maxReplicas",
        ),
        (
            models(device="cuda", gpus=2),
            "models.m.gpus = 2: expected 1, which is tensorParallelSize = 1 times pipelineParallelSize = 1",
        ),
        (
            models(device="cuda", gpus=5, tensorParallelSize=2, pipelineParallelSize=3),
            "models.m.gpus = 5: expected 6, which is tensorParallelSize = 2 times pipelineParallelSize = 3",
        ),
        (
            models(device="cuda", tensorParallelSize=2, resources={"limits": {"nvidia.com/gpu": 4}}),
            "models.m.resources.limits.nvidia.com/gpu = 4: expected 2, which is tensorParallelSize = 2",
        ),
        (models(gpus=1), "models.m.gpus = 1: expected 0 with device cpu"),
        (
            models(tensorParallelSize=3, pipelineParallelSize=22),
            "models.m.pipelineParallelSize = 22: expected 1 to 21 with tensorParallelSize = 3",
        ),
        (models(tensorParallelSize=0), "tensorParallelSize"),
        (models(pipelineParallelSize=65), "pipelineParallelSize"),
        (
            models(args=["--pipeline-parallel-size", "2"]),
            "models.m.args has --pipeline-parallel-size: expected the value pipelineParallelSize instead",
        ),
        (
            models(args=["--tensor-parallel-size=2"]),
            "models.m.args has --tensor-parallel-size=2: expected the value tensorParallelSize instead",
        ),
        (
            models(args=["--max-num-seqs", "2", "--exit-timeout-s=300"]),
            "models.m.args has --exit-timeout-s=300: expected the value exitSeconds instead, which the",
        ),
        (
            models(args=["--shutdown-delay-s", "60"]),
            "models.m.args has --shutdown-delay-s: expected the value preStopSeconds instead, which the",
        ),
    ],
)
def test_what_can_not_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=re.escape(message)):
        render(json.dumps({"image": IMAGE, "keys": KEYS, "models": {"m": VOLUME}} | values))


@pytest.mark.parametrize("name", ["runtime.yaml", "service.yaml"])
def test_manifests_of_kserve_are_valid(name: str) -> None:
    checked = check((ROOT / "deploy" / "kserve" / name).read_text())
    assert checked.problems == []


def test_kserve_runs_naiad_with_its_options() -> None:
    folder = ROOT / "deploy" / "kserve"
    (runtime,) = check((folder / "runtime.yaml").read_text()).documents
    (service,) = check((folder / "service.yaml").read_text()).documents
    (container,) = runtime["spec"]["containers"]
    predictor = service["spec"]["predictor"]
    args = parsed([*container["args"], *predictor["model"]["args"]])
    assert (args.model, args.openai_port) == ("/mnt/models", container["ports"][0]["containerPort"])
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert predictor["terminationGracePeriodSeconds"] >= args.exit_timeout_s + pause + 15
    assert predictor["model"]["runtime"] == runtime["metadata"]["name"]


def test_a_wrong_manifest_is_found() -> None:
    text = Path(ROOT / "deploy" / "kserve" / "runtime.yaml").read_text()
    assert check(text.replace("supportedModelFormats", "supportedFormats")).problems
    assert check(text.replace("containerPort: 8080", "containerPort: eighty")).problems
    assert check("apiVersion: apps/v2\nkind: Deployment\nmetadata: {name: a}\n").problems
