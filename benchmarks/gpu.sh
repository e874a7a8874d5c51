#!/usr/bin/env bash
# One command for a machine with a GPU: parity tests, then speed. It needs torch 2.11 or later, no installation and no
# network, and ends in time. Called again, it goes on where it was. More: docs/gpu.md
#
#   benchmarks/gpu.sh --out build/gpu [--wheels FOLDER] [--minutes 8] [further options: --help]
set -euo pipefail

wheels=""
options=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="${2:?name the folder of wheels}"; shift 2 ;;
    *) options+=("$1"); shift ;;
  esac
done
source "$(dirname "${BASH_SOURCE[0]}")/gpu_env.sh"
need torch numpy safetensors tokenizers jinja2 httpx
python3 "$root/benchmarks/gpu.py" "${options[@]}"
