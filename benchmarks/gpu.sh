#!/usr/bin/env bash
# One command for a machine with a GPU: parity tests, then speed. It needs torch 2.11 or later, no installation and no
# network, and ends in time. Called again, it goes on where it was. More: docs/gpu.md
#
#   benchmarks/gpu.sh --out build/gpu [--wheels FOLDER] [--minutes 8] [--tiny] [further options: --help]
set -euo pipefail

wheels=""
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="${2:?name the folder of wheels}"; shift 2 ;;
    *) options+=("$1"); shift ;;
  esac
done
source "$(dirname "${BASH_SOURCE[0]}")/gpu_suite/environment.sh"
need torch numpy safetensors tokenizers jinja2 httpx
python3 "$root/benchmarks/gpu.py" "${options[@]}" &
driver=$!
# bash would wait for the driver before it heeds a signal; so the driver hears of it, writes, and ends.
trap 'kill -TERM "$driver" 2>/dev/null || true' INT TERM
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2>/dev/null; do
  code=0
  wait "$driver" || code=$?
done
exit "$code"
