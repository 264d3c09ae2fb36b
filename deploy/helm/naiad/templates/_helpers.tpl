{{/* The settings of a model: what it says, over the defaults. Called with a list: the root, and its name. */}}
{{- define "naiad.settings" -}}
{{- $root := index . 0 -}}
{{- toYaml (mergeOverwrite (deepCopy $root.Values.defaults) (deepCopy (index $root.Values.models (index . 1) | default dict))) -}}
{{- end -}}

{{/* The name of a model's objects; a long one ends with its hash, so that no two are the same. */}}
{{- define "naiad.name" -}}
{{- $root := index . 0 -}}
{{- $name := printf "%s-%s" $root.Release.Name (index . 1) -}}
{{- if le (len $name) 63 -}}
{{- $name -}}
{{- else -}}
{{- printf "%s-%s" ($name | trunc 52 | trimSuffix "-") ($name | sha256sum | trunc 10) -}}
{{- end -}}
{{- end -}}

{{- define "naiad.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: naiad
app.kubernetes.io/instance: {{ $root.Release.Name | quote }}
naiad/model: {{ index . 1 | quote }}
{{- end -}}

{{- define "naiad.labels" -}}
{{- $root := index . 0 -}}
{{ include "naiad.selector" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version }}
{{- end -}}

{{- define "naiad.image" -}}
{{- $image := .Values.image -}}
{{- $image.repository -}}
{{- if $image.digest -}}@{{ $image.digest }}{{- else -}}:{{ $image.tag }}{{- end -}}
{{- end -}}

{{- define "naiad.keysSecret" -}}
{{- .Values.keys.existingSecret | default (printf "%s-keys" .Release.Name) -}}
{{- end -}}

{{/* What the schema can not say. */}}
{{- define "naiad.check" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 -}}
{{- $model := index . 2 -}}
{{- $keys := $root.Values.keys -}}
{{- if not (or $root.Values.image.tag $root.Values.image.digest) -}}
{{- fail "image.tag and image.digest are both empty: name one of them" -}}
{{- end -}}
{{- if eq (empty $keys.existingSecret) (empty $keys.entries) -}}
{{- fail "keys: name either existingSecret or entries: a server that other machines reach needs keys" -}}
{{- end -}}
{{- if eq (empty $model.source.claim) (empty $model.source.hub) -}}
{{- fail (printf "models.%s.source: name either claim or hub" $name) -}}
{{- end -}}
{{- if and $model.source.claim (not $model.source.path) -}}
{{- fail (printf "models.%s.source.path is empty: name the checkpoint's folder in the claim" $name) -}}
{{- end -}}
{{- include "naiad.checkSplit" (list $name $model) -}}
{{- include "naiad.checkArgs" (list $name $model) -}}
{{- if and $model.deepHealth (not $keys.operatorSecret) -}}
{{- fail (printf "models.%s.deepHealth needs keys.operatorSecret: only operators may ask for it" $name) -}}
{{- end -}}
{{- if and $model.inferencePool.enabled (not $model.inferencePool.endpointPicker.name) -}}
{{- fail (printf "models.%s.inferencePool.endpointPicker.name is empty: name the picker's Service" $name) -}}
{{- end -}}
{{- if and $model.inferencePool.enabled (not $root.Values.metrics.open) -}}
{{- fail (printf "models.%s.inferencePool needs metrics.open: endpoint pickers have no key" $name) -}}
{{- end -}}
{{- if and $root.Values.metrics.serviceMonitor.enabled (not $root.Values.metrics.open) (not $keys.operatorSecret) -}}
{{- fail "metrics.serviceMonitor needs metrics.open or keys.operatorSecret: /metrics asks for an operator's key" -}}
{{- end -}}
{{- if gt (int $model.autoscaling.minReplicas) (int $model.autoscaling.maxReplicas) -}}
{{- fail (printf "models.%s.autoscaling: minReplicas is above maxReplicas" $name) -}}
{{- end -}}
{{- end -}}

{{/* How many processes share a model, which is how many GPUs it has with cuda. Called with its settings. */}}
{{- define "naiad.numRanks" -}}
{{- mul .tensorParallelSize .pipelineParallelSize -}}
{{- end -}}

{{/* Whether a model is split over the GPUs that it gets. Called with its name and its settings. */}}
{{- define "naiad.checkSplit" -}}
{{- $name := index . 0 -}}
{{- $model := index . 1 -}}
{{- $parts := int $model.tensorParallelSize -}}
{{- $stages := int $model.pipelineParallelSize -}}
{{- $ranks := include "naiad.numRanks" $model | int -}}
{{- $expected := printf "%d, which is tensorParallelSize = %d times pipelineParallelSize = %d" $ranks $parts $stages -}}
{{- if gt $ranks 64 -}}
{{- fail (printf "models.%s.pipelineParallelSize = %d: expected 1 to %d with tensorParallelSize = %d" $name $stages (div 64 $parts) $parts) -}}
{{- end -}}
{{- if and $model.gpus (eq $model.device "cpu") -}}
{{- fail (printf "models.%s.gpus = %d: expected 0 with device cpu" $name (int $model.gpus)) -}}
{{- end -}}
{{- if and $model.gpus (ne (int $model.gpus) $ranks) -}}
{{- fail (printf "models.%s.gpus = %d: expected %s, or 0 for that number" $name (int $model.gpus) $expected) -}}
{{- end -}}
{{- $limit := index ($model.resources.limits | default dict) "nvidia.com/gpu" -}}
{{- if and (eq $model.device "cuda") $limit (ne (toString $limit) (toString $ranks)) -}}
{{- fail (printf "models.%s.resources.limits.nvidia.com/gpu = %v: expected %s, or no such limit" $name $limit $expected) -}}
{{- end -}}
{{- end -}}

{{/* Whether `args` has no option that the chart counts with. Called with a model's name and its settings. */}}
{{- define "naiad.checkArgs" -}}
{{- $name := index . 0 -}}
{{- $model := index . 1 -}}
{{- $gpus := "instead, by which GPUs are counted" -}}
{{- $grace := "instead, which the pod's grace period counts" -}}
{{- range $option, $value := dict "--tensor-parallel-size" (printf "tensorParallelSize %s" $gpus) "--pipeline-parallel-size" (printf "pipelineParallelSize %s" $gpus) "--exit-timeout-s" (printf "exitSeconds %s" $grace) "--shutdown-delay-s" (printf "preStopSeconds %s" $grace) -}}
{{- range $model.args -}}
{{- if eq (splitList "=" . | first) $option -}}
{{- fail (printf "models.%s.args has %s: expected the value %s" $name . $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
