"""What custom resources have to look like: the fields of theirs that Naiad's manifests use.

Names and types are those of the CRDs of Gateway API Inference Extension, KEDA, Prometheus Operator and
KServe. Fields that are not listed are refused, so a new one has to be looked up first.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string", "minLength": 1}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_TEXTS: Schema = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}
# Kubernetes' own objects inside, which are checked as parts of a Pod.
_OBJECT: Schema = {"type": "object"}


def _object(required: str, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(spec: Schema) -> Schema:
    kind = _object("apiVersion kind metadata spec", apiVersion=_TEXT, kind=_TEXT, metadata=_OBJECT, spec=spec)
    return kind


_INFERENCE_POOL = _object(
    "selector targetPorts endpointPickerRef",
    selector=_object("matchLabels", matchLabels=_TEXTS),
    targetPorts=_list(_object("number", number=_PORT)) | {"maxItems": 8},
    endpointPickerRef=_object(
        "name port",
        name=_TEXT,
        port=_object("number", number=_PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)

_SERVICE_MONITOR = _object(
    "selector endpoints",
    selector=_object("matchLabels", matchLabels=_TEXTS),
    endpoints=_list(
        _object(
            "port",
            port=_TEXT,
            path=_TEXT,
            interval={"type": "string", "pattern": r"^\d+(ms|s|m)$"},
            authorization=_object("credentials", credentials=_object("name key", name=_TEXT, key=_TEXT)),
        )
    ),
)

_SCALED_OBJECT = _object(
    "scaleTargetRef triggers",
    scaleTargetRef=_object("name", name=_TEXT),
    minReplicaCount=_COUNT,
    maxReplicaCount=_COUNT,
    advanced=_object(
        "horizontalPodAutoscalerConfig",
        horizontalPodAutoscalerConfig=_object(
            "behavior",
            behavior=_object("scaleDown", scaleDown=_object("", stabilizationWindowSeconds=_COUNT)),
        ),
    ),
    triggers=_list(
        _object(
            "type metadata",
            type={"const": "prometheus"},
            name=_TEXT,
            metricType={"enum": ["AverageValue", "Value"]},
            # Values of a trigger are texts, numbers too.
            metadata=_object(
                "serverAddress query threshold", serverAddress=_TEXT, query=_TEXT, threshold=_TEXT
            ),
        )
    ),
)

_SERVING_RUNTIME = _object(
    "supportedModelFormats containers",
    annotations=_TEXTS,
    supportedModelFormats=_list(
        _object("name", name=_TEXT, version=_TEXT, autoSelect={"type": "boolean"}, priority=_COUNT)
    ),
    protocolVersions=_list({"enum": ["v1", "v2", "grpc-v1", "grpc-v2"]}),
    containers=_list(_OBJECT),
    volumes=_list(_OBJECT),
)

_INFERENCE_SERVICE = _object(
    "predictor",
    predictor=_object(
        "model",
        minReplicas=_COUNT,
        maxReplicas=_COUNT,
        terminationGracePeriodSeconds=_COUNT,
        automountServiceAccountToken={"type": "boolean"},
        securityContext=_OBJECT,
        model=_object(
            "modelFormat storageUri",
            modelFormat=_object("name", name=_TEXT, version=_TEXT),
            runtime=_TEXT,
            storageUri={"type": "string", "pattern": "^(hf|pvc|s3|gs|https)://"},
            args=_list({"type": "string"}),
            resources=_OBJECT,
        ),
    ),
)

# API version and kind → schema.
CUSTOM_KINDS: dict[tuple[str, str], Schema] = {
    ("inference.networking.k8s.io/v1", "InferencePool"): _resource(_INFERENCE_POOL),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _resource(_SERVICE_MONITOR),
    ("keda.sh/v1alpha1", "ScaledObject"): _resource(_SCALED_OBJECT),
    ("serving.kserve.io/v1alpha1", "ServingRuntime"): _resource(_SERVING_RUNTIME),
    ("serving.kserve.io/v1beta1", "InferenceService"): _resource(_INFERENCE_SERVICE),
}
