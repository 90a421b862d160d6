{{- define "llmops.name" -}}{{ .Release.Name | trunc 40 | trimSuffix "-" }}{{- end }}

{{- define "llmops.labels" -}}
app.kubernetes.io/name: llmops
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: llmops-{{ .Chart.Version }}
{{- end }}

{{- /* what a pod is found by: (dict "root" $ "part" "gateway") */ -}}
{{- define "llmops.selector" -}}
app.kubernetes.io/name: llmops
app.kubernetes.io/instance: {{ .root.Release.Name }}
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
  - name: {{ . }}
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
  valueFrom: {secretKeyRef: {name: {{ .secret.name }}, key: {{ .secret.key }}}}
{{- end }}
{{- end }}

{{- /* pods of one part on different nodes, where that is possible */ -}}
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

{{- define "llmops.checks" -}}
{{- if and .Values.control.enabled (not .Values.secrets.store.name) }}{{ fail "control keeps everything in the store: set secrets.store.name, or control.enabled=false" }}{{ end }}
{{- if and (not .Values.secrets.store.name) (not .Values.open) }}{{ fail "without secrets.store.name there are no keys, and gateways ask for them: set it, or open=true" }}{{ end }}
{{- if not .Values.engines }}{{ fail "there is nothing to serve: name a pool in engines" }}{{ end }}
{{- range $name, $pool := .Values.engines }}
{{- if not $pool.repository }}{{ fail (printf "engines.%s needs its repository" $name) }}{{ end }}
{{- if and (gt (int (default 1 $pool.nodes)) 1) (not $pool.leaderScript) }}{{ fail (printf "engines.%s has several nodes: set leaderScript" $name) }}{{ end }}
{{- end }}
{{- end }}

{{- define "llmops.dns" -}}
- to: [{namespaceSelector: {}, podSelector: {matchLabels: {k8s-app: kube-dns}}}]
  ports: [{port: 53, protocol: UDP}, {port: 53, protocol: TCP}]
{{- end }}
{{- define "llmops.scraped" -}}
{{- if .root.Values.monitoring.enabled }}
- from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: {{ .root.Values.monitoring.namespace }}}}}]
  ports: [{port: {{ .port }}}]
{{- end }}
{{- end }}
