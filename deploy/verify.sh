#!/usr/bin/env bash
# Proves the deployment files with the tools that operators use. Not a quick test: it builds an image.
#
#     deploy/verify.sh [lint] [alerts] [kubernetes] [image] [stack]    without an argument: all of them
#
# lint    Dockerfile (hadolint), compose file (the compose-spec schema), the dashboard's file, CI's workflow and the issue
#         forms (GitHub's schemas; actionlint, where it is installed)
# alerts  Prometheus' configuration, and when each alert fires (promtool)
# kubernetes
#         every overlay: rendered (kubectl kustomize), valid against the API's schemas (kubernetes-validate), its objects
#         fit together; the queries of prometheus-adapter's rules (promtool, where it is installed)
# image   built with buildah, run with podman: without a network, with a read-only root, no capabilities and a memory
#         limit; it answers, its health check passes, SIGTERM lets a running answer end
# stack   docker-compose.yml by podman-compose: server and Prometheus come up, a chat is answered, and after some load
#         every query of the dashboard has data; EngineDown fires when the server is stopped. Grafana is left out.
#
# needs   hadolint, check-jsonschema, promtool, kubectl, kubernetes-validate and PyYAML, buildah, podman, podman-compose,
#         curl, and for stand-ins debootstrap
# BUILD_OPTIONS  more options for buildah: mounts of pip's configuration, --build-arg TORCH_INDEX=...
# STAND_INS=1    where no registry of images can be reached: make the base image with debootstrap, and Prometheus'
#                from the one that is installed here
# MEMORY         the server's limit in `image` (2g)
# TOKENS         length of the answer that is drained (400): more for a machine that writes them within a second
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

IMAGE=hamburger-serve:cpu # the compose file's name of it
PORT=${PORT:-18000}
work="$(mktemp -d)"
name="hamburger-verify-$$"

cleanup() {
  podman rm --force "$name" >/dev/null 2>&1 || true
  if [ -f "$work/.env" ]; then stack down --volumes >/dev/null 2>&1 || true; fi
  rm -rf "$work"
}
trap cleanup EXIT

say() { printf '\n== %s\n' "$*"; }
fail() { echo "verify: $*" >&2; exit 1; }

# Podman asks systemd for cgroups unless told otherwise.
if [ ! -d /run/systemd/system ] && [ -z "${CONTAINERS_CONF:-}" ]; then
  export CONTAINERS_CONF="$work/containers.conf"
  printf '%s\n' '[containers]' 'default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]' \
    '[engine]' 'cgroup_manager = "cgroupfs"' 'runtime = "runc"' 'events_logger = "file"' \
    '[network]' 'network_backend = "netavark"' >"$CONTAINERS_CONF"
fi

# until_ok SECONDS COMMAND...
until_ok() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@" >/dev/null 2>&1; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 0.5
  done
}

chat() { # PORT TOKENS [curl options]
  local body='{"messages": [{"role": "user", "content": "Tell me a long story."}], "temperature": 0, "ignore_eos": true'
  curl --silent --show-error --fail --no-buffer "http://127.0.0.1:$1/v1/chat/completions" \
    --header 'Content-Type: application/json' --data "$body, \"max_tokens\": $2${3:-}}"
}

firing() { # PROMETHEUS ALERT
  curl --silent --fail "$1/api/v1/alerts" | grep -q "\"alertname\":\"$2\".*\"state\":\"firing\""
}

image_of() { sed -n "s/^ARG $1=//p" Dockerfile; }

base_image() { # the image that the Dockerfile begins with
  local base
  base="$(image_of PYTHON_IMAGE)"
  podman image exists "$base" && return
  [ "${STAND_INS:-}" = 1 ] || { podman pull --quiet "$base"; return; }
  say "a stand-in for $base"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip,python3-venv bookworm "$work/rootfs" \
    >"$work/debootstrap.log"
  tar -C "$work/rootfs" -c . | podman import --quiet - "$base"
  rm -rf "$work/rootfs"
}

prometheus_image() {
  local image context="$work/prometheus"
  image="$(sed -n 's/^ *image: \(.*prometheus:.*\)/\1/p' docker-compose.yml)"
  podman image exists "$image" && return
  [ "${STAND_INS:-}" = 1 ] || { podman pull --quiet "$image"; return; }
  say "a stand-in for $image: $(prometheus --version 2>&1 | head -1)"
  mkdir "$context"
  cp "$(command -v prometheus)" "$context/"
  printf '%s\n' "FROM $(image_of PYTHON_IMAGE)" 'COPY prometheus /bin/prometheus' \
    'RUN install -d -o 65534 -g 65534 /prometheus' 'USER 65534:65534' 'WORKDIR /prometheus' \
    'ENTRYPOINT ["/bin/prometheus"]' >"$context/Dockerfile"
  buildah bud --quiet --format docker --isolation chroot --pull-never --tag "$image" "$context"
}

verify_lint() {
  say "Dockerfile: hadolint"
  hadolint Dockerfile
  say "docker-compose.yml: the compose-spec schema"
  check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml
  say "the dashboard is what deploy/dashboard.py writes"
  python3 deploy/dashboard.py --check
  say ".github: the schemas of workflows and issue forms"
  check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
  check-jsonschema --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml
  check-jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
  check-jsonschema --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/{bug,feature}.yml
  command -v actionlint >/dev/null || { echo "actionlint is not here: the workflows' expressions were not checked"; return; }
  say ".github/workflows: actionlint"
  actionlint
}

verify_alerts() {
  say "Prometheus: configuration, rules, and when the alerts fire"
  promtool check config deploy/prometheus/prometheus.yml
  (cd deploy/prometheus && promtool test rules alerts_test.yml)
}

verify_kubernetes() {
  local overlay rendered="$work/rendered.yaml"
  for overlay in deploy/kubernetes/overlays/*/; do
    say "$overlay: kustomize, the API's schemas, and whether its objects fit together"
    kubectl kustomize "$overlay" >"$rendered"
    kubernetes-validate --strict "$rendered" # it knows no schema of ServiceMonitor, which the next line checks
    python3 deploy/check_kubernetes.py <"$rendered"
  done
  command -v promtool >/dev/null || { echo "promtool is not here: the adapter's queries were not checked"; return; }
  say "prometheus-adapter: its queries"
  python3 deploy/check_kubernetes.py --queries deploy/kubernetes/prometheus-adapter.yaml >"$work/adapter.yml"
  promtool check rules "$work/adapter.yml"
}

build() {
  base_image
  say "build $IMAGE"
  local start=$SECONDS
  # shellcheck disable=SC2086 # several words
  buildah bud --format docker --isolation chroot --pull-never --layers ${BUILD_OPTIONS:-} --tag "$IMAGE" . \
    >"$work/build.log" 2>&1 || { tail -n 30 "$work/build.log" >&2; fail "the build failed"; }
  echo "built in $((SECONDS - start)) s: $(podman image inspect --format '{{.Size}}' "$IMAGE") bytes"
}

confined() { # run the image as an operator should: podman options
  podman run --detach --name "$name" --read-only --read-only-tmpfs=false --tmpfs /tmp --cap-drop ALL \
    --security-opt no-new-privileges --memory "${MEMORY:-2g}" --pids-limit 512 "$@" "$IMAGE" >/dev/null 2>"$work/run.log" ||
    { cat "$work/run.log" >&2; fail "podman could not run it"; }
}

ready() { # LIMIT IN SECONDS COMMAND...
  local start
  start="$(date +%s.%N)"
  until_ok "$@" || { podman logs "$name" >&2; fail "it is not healthy after $1 s"; }
  echo "healthy after $(awk "BEGIN {printf \"%.1f\", $(date +%s.%N) - $start}") s"
}

verify_image() {
  build
  say "without a network: it loads its own weights, and answers inside"
  confined --network none
  ready 120 podman healthcheck run "$name"
  podman exec "$name" hamburger bench --concurrency 2 --requests 4 --output-tokens 16
  [ "$(podman exec "$name" id -u)" = 10001 ] || fail "it does not run as its own user"
  podman exec "$name" grep -q '^CapEff:[[:space:]]*0*$' /proc/1/status || fail "it has capabilities"
  ! podman exec "$name" touch /opt/hamburger/x 2>/dev/null || fail "its root can be written"
  podman rm --force "$name" >/dev/null 2>&1

  say "SIGTERM lets a running answer end, and refuses new ones"
  confined --network host --env HAMBURGER_PORT="$PORT" --env HAMBURGER_DRAIN_SECONDS=600
  ready 120 curl --silent --fail "http://127.0.0.1:$PORT/health"
  chat "$PORT" "${TOKENS:-400}" ', "stream": true' >"$work/stream" &
  local stream=$! status
  until_ok 30 grep -q '"content"' "$work/stream" || fail "the answer did not begin"
  podman kill --signal TERM "$name" >/dev/null
  sleep 1
  kill -0 "$stream" 2>/dev/null || fail "the answer was over before the signal could matter: raise TOKENS"
  status="$(curl --silent --output "$work/refused" --write-out '%{http_code}' "http://127.0.0.1:$PORT/ready")"
  [ "$status" = 503 ] || fail "/ready says $status while it drains"
  wait "$stream" || fail "the answer was cut off"
  grep -q '"finish_reason": *"length"' "$work/stream" || fail "the answer did not end by its limit"
  grep -q '^data: \[DONE\]' "$work/stream" || fail "the stream has no end"
  status="$(podman wait "$name" 2>/dev/null)"
  [ "$status" = 0 ] || fail "exit code $status"
  echo "the answer ended whole, /ready said 503 meanwhile, exit code 0"
  podman rm --force "$name" >/dev/null 2>&1
}

stack() {
  podman-compose --project-name hamburger-verify --env-file "$work/.env" --file docker-compose.yml "$@"
}

verify_stack() {
  podman image exists "$IMAGE" || build
  prometheus_image
  say "podman-compose: the server and Prometheus"
  sed -e "s/^PORT=.*/PORT=$PORT/; s/^PROMETHEUS_PORT=.*/PROMETHEUS_PORT=$((PORT + 1))/" \
    -e "s|^GRAFANA_PASSWORD=.*|GRAFANA_PASSWORD=verify|; s|^MODELS=.*|MODELS=$work/models|" .env.example >"$work/.env"
  mkdir "$work/models"
  stack up --detach --no-build server prometheus >"$work/up.log" 2>&1 || { cat "$work/up.log" >&2; fail "it did not come up"; }
  local prometheus="http://127.0.0.1:$((PORT + 1))"
  until_ok 120 curl --silent --fail "http://127.0.0.1:$PORT/health" || { stack logs >&2; fail "no health"; }
  until_ok 60 curl --silent --fail "$prometheus/-/ready" || { stack logs >&2; fail "Prometheus is not ready"; }
  chat "$PORT" 16
  podman inspect --format '{{.HostConfig.ReadonlyRootfs}} {{.EffectiveCaps}} {{.HostConfig.Memory}}' \
    hamburger-verify_server_1 >"$work/limits"
  grep -qE '^true \[\] [1-9]' "$work/limits" || fail "read-only, capabilities and memory are: $(cat "$work/limits")"
  say "load, with requests that are refused, until Prometheus has scraped it often enough"
  local end=$((SECONDS + 60))
  while [ "$SECONDS" -lt "$end" ]; do
    curl --silent --output "$work/refused" --data '{}' "http://127.0.0.1:$PORT/v1/chat/completions"
    stack exec server hamburger bench --concurrency 4 --requests 8 --output-tokens 48 --confidence 0.5 >"$work/bench.log" 2>&1 ||
      { cat "$work/bench.log" >&2; fail "the load failed"; }
  done
  sleep 12 # one scrape more
  python3 deploy/check_dashboard.py "$prometheus"
  say "a server that was stopped: EngineDown fires"
  stack stop server >/dev/null 2>&1
  until_ok 180 firing "$prometheus" EngineDown || fail "EngineDown does not fire"
  echo "it fires"
  stack down --volumes >/dev/null 2>&1
}

parts=("$@")
[ $# -gt 0 ] || parts=(lint alerts kubernetes image stack)
for part in "${parts[@]}"; do
  case "$part" in
  lint | alerts | kubernetes | image | stack) "verify_$part" ;;
  *) fail "$part is not a part: lint, alerts, kubernetes, image or stack" ;;
  esac
done
say "verified: ${parts[*]}"
