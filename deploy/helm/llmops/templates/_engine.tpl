{{- /* Write a pod that serves an engine, or a worker of a group: (dict "root" $ "name" … "pool" … "role" "single|leader|worker") */ -}}
{{- define "llmops.engine.template" -}}
{{- $values := .root.Values }}
{{- $drain := ternary .pool.drainSeconds 60 (hasKey .pool "drainSeconds") }}
{{- /* The seconds that models may take to load, for the server and its startup probe */ -}}
{{- $startup := mul (default 60 .pool.startupMinutes) 60 }}
metadata:
  labels:
    {{- include "llmops.selector" (dict "root" .root "part" "engine") | nindent 4 }}
    llmops/pool: {{ .name | quote }}
    llmops/role: {{ .role }}
spec:
  {{- $pod := include "llmops.pod" .root | fromYaml }}
  {{- if eq .role "leader" }}
  {{- /* mpirun reaches the other pods of its group through the Kubernetes API. */ -}}
  {{- $_ := set $pod "automountServiceAccountToken" true }}
  serviceAccountName: {{ include "llmops.name" .root }}-{{ .name }}
  {{- end }}
  {{- toYaml $pod | nindent 2 }}
  {{- include "llmops.place.gpu" .pool | nindent 2 }}
  terminationGracePeriodSeconds: {{ add $drain 30 }}
  {{- if ne .role "worker" }}
  initContainers:
    # The pod waits for its repository, because a Job of the same release may still build the engine.
    - name: wait
      image: {{ $values.image.engine }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      command: [python3, -m, llmops.model_repository.wait, {{ .pool.repository | quote }}]
      securityContext: {{- include "llmops.container" .root | nindent 8 }}
      resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {memory: 512Mi}}
      volumeMounts:
        - {name: models, mountPath: {{ $values.storage.mountPath | quote }}, readOnly: true}
        - {name: tmp, mountPath: /tmp}
  {{- end }}
  containers:
    - name: engine
      image: {{ $values.image.engine }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if eq .role "single" }}
      args: [serve, {{ .pool.repository | quote }}, --host, 0.0.0.0, --exit-timeout, {{ printf "%ds" (int $drain) }}, --ready-timeout, {{ printf "%ds" $startup }}]
      {{- else if eq .role "leader" }}
      command: [/bin/bash, /llmops/leader.sh]
      {{- else }}
      command: [/bin/sh, -c, "trap 'exit 0' TERM; sleep infinity & wait"]
      {{- end }}
      env:
        - {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
        - {name: HOME, value: /tmp}
        - {name: LLMOPS_CACHE, value: /tmp/llmops}
        {{- if eq .role "leader" }}
        # leader.sh waits for the group's other pods for the same time.
        - {name: GROUP_TIMEOUT, value: {{ printf "%ds" $startup | quote }}}
        {{- end }}
      {{- if ne .role "worker" }}
      ports: [{name: grpc, containerPort: 8001}, {name: metrics, containerPort: 8002}]
      # This is a minute longer than --ready-timeout, so that the server itself can log which model did not load.
      startupProbe: {grpc: {port: 8001}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: {{ add (div $startup 10) 6 }}}
      readinessProbe: {grpc: {port: 8001}, periodSeconds: 5, timeoutSeconds: 5, failureThreshold: 3}
      livenessProbe: {grpc: {port: 8001}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 6}
      {{- end }}
      securityContext: {{- include "llmops.container" .root | nindent 8 }}
      {{- $resources := deepCopy (default dict .pool.resources) }}
      {{- $limits := merge (dict (default "nvidia.com/gpu" .pool.gpuResource) (default 1 .pool.gpus | toString)) (default dict $resources.limits) }}
      resources: {{- merge (dict "limits" $limits) $resources | toYaml | nindent 8 }}
      volumeMounts:
        - {name: models, mountPath: {{ $values.storage.mountPath | quote }}, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- if ne .role "single" }}
        - {name: launch, mountPath: /llmops, readOnly: true}
        {{- end }}
  volumes:
    - {name: models, persistentVolumeClaim: {claimName: {{ $values.storage.claim | quote }}, readOnly: true}}
    - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ default "16Gi" .pool.sharedMemory }}}}
    - {name: tmp, emptyDir: {sizeLimit: 20Gi}}
    {{- if ne .role "single" }}
    - {name: launch, configMap: {name: {{ include "llmops.name" .root }}-{{ .name }}-launch, defaultMode: 0555}}
    {{- end }}
{{- end }}
