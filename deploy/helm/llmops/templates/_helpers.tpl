{{- define "llmops.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "llmops.labels" -}}
app.kubernetes.io/name: llmops
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: llmops-{{ .Chart.Version }}
{{- end }}

{{- /* Write the labels that select a pod: (dict "root" $ "part" "gateway") */ -}}
{{- define "llmops.selector" -}}
app.kubernetes.io/name: llmops
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .part }}
{{- end }}

{{- define "llmops.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
{{- end }}

{{- define "llmops.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "llmops.secret" -}}
{{- if .secret.name }}
- name: {{ .env }}
  valueFrom: {secretKeyRef: {name: {{ .secret.name | quote }}, key: {{ .secret.key | quote }}}}
{{- end }}
{{- end }}

{{- /* Spread the pods of one part over nodes if possible. */ -}}
{{- define "llmops.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "llmops.selector" . | nindent 8 }}
{{- end }}

{{- define "llmops.place" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Write the current number of replicas of a scaled workload. If an upgrade left out `replicas`, which an earlier release
  set, Kubernetes would reset them to 1.
  (dict "root" $ "apiVersion" … "kind" … "name" …) */ -}}
{{- define "llmops.scaled" -}}
{{- with lookup .apiVersion .kind .root.Release.Namespace .name }}
replicas: {{ max 1 (int .spec.replicas) }}
{{- end }}
{{- end }}

{{- /* Nodes with GPUs usually have a taint that keeps other pods away. */ -}}
{{- define "llmops.place.gpu" -}}
{{- $gpu := dict "key" "nvidia.com/gpu" "operator" "Exists" "effect" "NoSchedule" }}
{{- include "llmops.place" (dict "nodeSelector" .nodeSelector "tolerations" (prepend (default list .tolerations) $gpu)) }}
{{- with .runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end }}

{{- /* Write the given Kafka settings as a dict. The gateway's defaults apply to the others. */ -}}
{{- define "llmops.kafka" -}}
{{- $given := dict }}
{{- if .Values.kafka.servers }}
{{- range $name, $value := .Values.kafka }}{{ if $value }}{{ $_ := set $given $name $value }}{{ end }}{{ end }}
{{- end }}
{{- $given | toYaml }}
{{- end }}

{{- define "llmops.image" -}}
{{- $pattern := "^([a-zA-Z0-9-]+([.][a-zA-Z0-9-]+)+(:[0-9]+)?|[a-zA-Z0-9-]+:[0-9]+)(/[a-z0-9._-]+)+(:[A-Za-z0-9_][A-Za-z0-9_.-]*)?@sha256:[0-9a-f]{64}$" }}
{{- if not (regexMatch $pattern .reference) }}
{{- fail (printf "image.%s is %q, which is not a full reference: push the image of %s to a registry that the nodes reach, and give REGISTRY/NAME[:TAG]@sha256:DIGEST" .name .reference .file) }}
{{- end }}
{{- end }}

{{- define "llmops.requests" -}}
{{- range $name := list "cpu" "memory" }}
{{- if not (dig "resources" "requests" $name "" $.part) }}
{{- fail (printf "%s needs resources.requests.%s, or its pods start on nodes without room for them: `llmops chart` writes what the model needs" $.place $name) }}
{{- end }}
{{- end }}
{{- end }}

{{- define "llmops.bounds" -}}
{{- if .scaling.enabled }}
{{- $min := int (default .min .scaling.min) }}
{{- $max := int (default .max .scaling.max) }}
{{- if gt $min $max }}{{ fail (printf "%s.autoscaling has min %d and max %d: min may not be more than max" .place $min $max) }}{{ end }}
{{- end }}
{{- end }}

{{- define "llmops.checks" -}}
{{- $root := . }}
{{- $release := include "llmops.name" . }}
{{- /* Kubernetes allows other names for pods, but not for Services (RFC 1035). */ -}}
{{- if not (regexMatch "^[a-z][a-z0-9-]*$" $release) }}{{ fail (printf "the release is named %s: name it with letters, digits and hyphens only, a letter first, as a Service must be" $release) }}{{ end }}
{{- include "llmops.bounds" (dict "place" "gateway" "scaling" .Values.gateway.autoscaling "min" 2 "max" 10) }}
{{- if and .Values.control.enabled (not .Values.secrets.store.name) }}{{ fail "control keeps everything in the store: set secrets.store.name, or control.enabled=false" }}{{ end }}
{{- if and (not .Values.secrets.store.name) (not .Values.open) }}{{ fail "gateways require API keys, which are in the store: set secrets.store.name, or open=true to serve callers without keys" }}{{ end }}
{{- if and .Values.secrets.store.name .Values.open }}{{ fail "open=true answers everyone without a key and bills no one, also the holders of the keys in secrets.store: leave one of the two out" }}{{ end }}
{{- if not .Values.engines }}{{ fail "engines is empty, so there is nothing to serve: name a pool in engines" }}{{ end }}
{{- include "llmops.image" (dict "name" "gateway" "reference" .Values.image.gateway "file" "Dockerfile.gateway") }}
{{- include "llmops.image" (dict "name" "engine" "reference" .Values.image.engine "file" "Dockerfile.trtllm") }}
{{- if .Values.builds }}{{ include "llmops.image" (dict "name" "build" "reference" .Values.image.build "file" "Dockerfile.build") }}{{ end }}
{{- if not .Values.storage.claim }}{{ fail "storage.claim is empty: create a PersistentVolumeClaim that many pods may mount, and name it here" }}{{ end }}
{{- range $name, $pool := .Values.engines }}
{{- $place := printf "engines.%s" $name }}
{{- if not (hasPrefix (printf "%s/" $root.Values.storage.mountPath) $pool.repository) }}{{ fail (printf "%s.repository is %s, and pods see only files below storage.mountPath (%s): move the repository there" $place $pool.repository $root.Values.storage.mountPath) }}{{ end }}
{{- if and (gt (int (default 1 $pool.nodes)) 1) (not $pool.leaderScript) }}{{ fail (printf "%s has several nodes, which needs leaderScript: set it to the leader.sh of `llmops serve REPOSITORY --export lws`" $place) }}{{ end }}
{{- if gt (int (default 1 $pool.nodes)) 1 }}
{{- range $other, $_ := $root.Values.engines }}
{{- /* A LeaderWorkerSet names its pods NAME-NUMBER and NAME-NUMBER-NUMBER, and its workers' StatefulSets NAME-NUMBER. */ -}}
{{- if regexMatch (printf "^%s-[0-9]+$" $name) $other }}{{ fail (printf "%s has several nodes, so pods of the pools %s and %s would have the same names: rename one of the two" $place $name $other) }}{{ end }}
{{- /* A LeaderWorkerSet creates a Service with its own name. */ -}}
{{- if and (eq $name (printf "%s-version" $other)) (dig "version" false (get $root.Values.engines $other)) }}{{ fail (printf "%s has several nodes, so its Service and that of the new version in the pool %s would have the same name: rename one of the two" $place $other) }}{{ end }}
{{- end }}
{{- end }}
{{- include "llmops.requests" (dict "place" $place "part" $pool) }}
{{- include "llmops.bounds" (dict "place" $place "scaling" (default dict $pool.autoscaling) "min" 1 "max" 4) }}
{{- /* A StatefulSet's pods have a label with its name and ten characters of a hash, so a name has 52 characters at most. */ -}}
{{- if gt (len (printf "%s-%s" $release $name)) 52 }}{{ fail (printf "%s: with the release's name that is more than the 52 characters which a StatefulSet may have; shorten one of the two" $place) }}{{ end }}
{{- end }}
{{- range $name, $build := .Values.builds }}
{{- include "llmops.requests" (dict "place" (printf "builds.%s" $name) "part" $build) }}
{{- if gt (len (printf "%s-build-%s" $release $name)) 54 }}{{ fail (printf "builds.%s: with the release's name that is more than the 63 characters which a Job may have; shorten one of the two" $name) }}{{ end }}
{{- end }}
{{- if and .Values.kafka.user (not .Values.secrets.kafka.name) }}{{ fail "kafka.user needs a password: set secrets.kafka.name" }}{{ end }}
{{- if and .Values.kafka.servers (not .Values.secrets.signing.name) }}{{ fail "usage events on Kafka are signed: set secrets.signing.name to a Secret with a signing key (`openssl rand -hex 32`)" }}{{ end }}
{{- if and (regexMatch "key_env: \"?\\w" (toYaml .Values.gateway.settings)) (not .Values.secrets.environment.name) }}{{ fail "gateway.settings name variables as key_env: set secrets.environment.name to a Secret with a key for each variable" }}{{ end }}
{{- /* The texts that a safety filter looks for are not addresses. */ -}}
{{- if regexMatch "(: |- )[\"']?\\w+://.*[@?#]" (regexReplaceAll "\\b(patterns|words):(\\n *- .*)+" (toYaml .Values.gateway.settings) "") }}{{ fail "gateway.settings has a URL with a user, a query or a fragment, which may be secrets, and the ConfigMap would show them: leave them out, and give the whole URL through secrets.environment" }}{{ end }}
{{- if and .Values.monitoring.enabled (not .Values.monitoring.runbooks) }}{{ fail "alerts link to their runbooks: publish deploy/runbooks.md and set monitoring.runbooks to its URL" }}{{ end }}
{{- if and .Values.monitoring.enabled (not .Values.monitoring.key.name) (or .Values.control.enabled (not .Values.open)) }}{{ fail "Prometheus needs a key for metrics: create one with `llmops key create --scopes metrics` and set monitoring.key.name to a Secret with it" }}{{ end }}
{{- if .Values.network.enabled }}
{{- $needed := dict "store" .Values.secrets.store.name "redis" .Values.secrets.redis.name "kafka" .Values.kafka.servers "oidc" .Values.gateway.settings.oidc "traces" .Values.gateway.settings.traces "hub" .Values.builds }}
{{- range $name, $wanted := $needed }}
{{- if and $wanted (not (get $root.Values.network.backends $name)) }}{{ fail (printf "pods may reach only what network policies name, and network.backends.%s names nothing: add an egress rule (`llmops chart` writes it from llmops.yaml), or set network.enabled=false" $name) }}{{ end }}
{{- end }}
{{- if not .Values.network.dns }}{{ fail "network.dns is empty, and pods resolve no names without an egress rule to the cluster's DNS: add the rule" }}{{ end }}
{{- end }}
{{- end }}

{{- define "llmops.dns" -}}
{{- toYaml .Values.network.dns }}
{{- end }}
{{- define "llmops.backends" -}}
{{- range $name := .names }}
{{- with get $.root.Values.network.backends $name }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}
{{- define "llmops.scraped" -}}
{{- if .root.Values.monitoring.enabled }}
- from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ .root.Values.monitoring.namespace | quote }}}}}]
  ports: [{port: {{ .port }}}]
{{- end }}
{{- end }}
