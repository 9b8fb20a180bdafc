{{- define "vla.labels" -}}
app.kubernetes.io/name: vla-platform
app.kubernetes.io/instance: {{ .release }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "vla.env" -}}
{{- $prefix := ternary "control-" "" (eq .role "control") }}
- name: VLA_ROLE
  value: {{ .role | quote }}
- name: VLA_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: {{ $prefix }}redis-url}}
- name: VLA_PAYLOAD_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: {{ $prefix }}payload-url}}
- name: VLA_S3_ACCESS_KEY
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: s3-access-key}}
- name: VLA_S3_SECRET_KEY
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: s3-secret-key}}
- name: VLA_S3_BUCKET
  value: {{ .root.Values.s3.bucket | quote }}
{{- with .root.Values.s3.endpoint }}
- name: VLA_S3_ENDPOINT
  value: {{ . | quote }}
{{- end }}
- name: VLA_SIGNING_KEY_FILE
  value: /run/vla/signing-key
- name: VLA_VAR
  value: /var/lib/vla
{{- range $name, $value := .root.Values.settings }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- range $name, $value := .environment }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "vla.deployment" -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  labels:
    {{- include "vla.labels" (dict "release" .root.Release.Name "component" .component) | nindent 4 }}
spec:
  replicas: {{ .replicas }}
  selector:
    matchLabels:
      {{- include "vla.labels" (dict "release" .root.Release.Name "component" .component) | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "vla.labels" (dict "release" .root.Release.Name "component" .component) | nindent 8 }}
    spec:
      terminationGracePeriodSeconds: {{ .grace }}
      securityContext: {runAsNonRoot: true, runAsUser: 10001, fsGroup: 10001}
      containers:
        - name: {{ .component }}
          image: {{ .image | quote }}
          imagePullPolicy: {{ .root.Values.image.pullPolicy }}
          args:
            {{- toYaml .arguments | nindent 12 }}
          env:
            {{- include "vla.env" . | nindent 12 }}
            {{- with .extraEnv }}
            {{- toYaml . | nindent 12 }}
            {{- end }}
          {{- with .port }}
          ports: [{containerPort: {{ . }}}]
          {{- end }}
          resources:
            {{- toYaml .resources | nindent 12 }}
          volumeMounts:
            - {name: signing-key, mountPath: /run/vla, readOnly: true}
            - {name: state, mountPath: /var/lib/vla}
            - {name: shm, mountPath: /dev/shm}
      volumes:
        - name: signing-key
          secret: {secretName: {{ .root.Values.secret }}, items: [{key: signing-key, path: signing-key}]}
        - {name: state, emptyDir: {}}
        - {name: shm, emptyDir: {medium: Memory, sizeLimit: 1Gi}}
{{- end }}

{{- define "vla.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "vla.service" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  labels:
    {{- include "vla.labels" (dict "release" .root.Release.Name "component" .component) | nindent 4 }}
spec:
  selector:
    {{- include "vla.labels" (dict "release" .root.Release.Name "component" .component) | nindent 4 }}
  ports:
    - {name: http, port: {{ .port }}, targetPort: {{ .port }}}
{{- end }}
