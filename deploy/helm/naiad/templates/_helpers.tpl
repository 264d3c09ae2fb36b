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
