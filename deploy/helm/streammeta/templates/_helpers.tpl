{{- define "streammeta.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "streammeta.selector" -}}
app.kubernetes.io/name: streammeta
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "streammeta.labels" -}}
{{ include "streammeta.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end -}}

{{- /* Account of the pods; empty: the namespace's default one. */ -}}
{{- define "streammeta.account" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "streammeta.name" .) }}
{{- else -}}
{{ .Values.serviceAccount.name }}
{{- end -}}
{{- end -}}

{{- define "streammeta.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{- /* Domain of the pods: pod streammeta-0 is streammeta-0.<this>. */ -}}
{{- define "streammeta.domain" -}}
{{ include "streammeta.name" . }}-peers.{{ .Release.Namespace }}.svc
{{- end -}}

{{- /* Voters of the first start; controller N is the pod of ordinal N-1. */ -}}
{{- define "streammeta.voters" -}}
{{- $voters := list -}}
{{- range $ordinal := until (int .Values.replicas) -}}
{{- $voters = append $voters (printf "%d@%s-%d.%s:9091" (add1 $ordinal) (include "streammeta.name" $) $ordinal (include "streammeta.domain" $)) -}}
{{- end -}}
{{- join "," $voters -}}
{{- end -}}

{{- /* Options of the template itself, which `options` may not give. */ -}}
{{- define "streammeta.check" -}}
{{- if and (not .Values.tls.secret) (not .Values.insecure) -}}
{{- fail "tls.secret: name the Secret with the certificates, or set insecure=true for plain text on all planes" -}}
{{- end -}}
{{- if and .Values.tls.secret .Values.insecure -}}
{{- fail "insecure: must be false with tls.secret" -}}
{{- end -}}
{{- if and .Values.serviceAccount.annotations (not .Values.serviceAccount.create) -}}
{{- fail "serviceAccount.annotations: needs serviceAccount.create, annotate an account of your own where it is made" -}}
{{- end -}}
{{- range $name := list "node-id" "cluster-id" "listen" "advertise" "peer-listen" "peer-advertise" "http-listen" "http-plain-text" "data-dir" "store" "backup-store" "tls-ca" "tls-cert" "tls-key" "insecure" -}}
{{- if hasKey $.Values.options $name -}}
{{- fail (printf "options.%s: the chart sets it by itself" $name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
