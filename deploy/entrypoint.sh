#!/bin/sh
# The image's entry point: MODEL and BASE stand for HAMBURGER_MODEL and HAMBURGER_BASE. An empty variable is an unset one.
export HAMBURGER_MODEL="${HAMBURGER_MODEL:-${MODEL:-}}" HAMBURGER_BASE="${HAMBURGER_BASE:-${BASE:-}}"
# OpenTelemetry would take an empty one for a value.
for name in $(env | sed -n 's/^\(OTEL_[A-Z_]*\)=$/\1/p'); do unset "$name"; done
# Without a volume at /cache the root may be read-only there: what Triton compiles then lasts as long as the container.
if [ -n "${TRITON_CACHE_DIR:-}" ] && ! { mkdir -p "$TRITON_CACHE_DIR" && [ -w "$TRITON_CACHE_DIR" ]; } 2>/dev/null; then
  export TRITON_CACHE_DIR=/tmp/triton
fi
# exec, so that the server itself is process 1 and gets the signal to drain.
exec hamburger "$@"
