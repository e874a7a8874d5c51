#!/usr/bin/env bash
# Trains the embedded default (training/embedded.sh) on a machine where nothing was installed and there is no network, in
# calls of limited time: it stops at a checkpoint before the time is over, with exit code 75. Call it again with the same
# arguments until it ends with 0. More: docs/gpu.md
#
#   benchmarks/gpu_train.sh PROMPTS WORK [--wheels FOLDER] [--minutes 9]
#
# ANSWERS, STAGE1, QUALITY and the other variables are those of training/embedded.sh.
set -euo pipefail

wheels="" minutes=9
paths=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels="${2:?name the folder of wheels}"; shift 2 ;;
    --minutes) minutes="${2:?say how many minutes this call may take}"; shift 2 ;;
    *) paths+=("$1"); shift ;;
  esac
done
if ! [[ "$minutes" =~ ^[0-9]+(\.[0-9]+)?$ ]]; then
  echo "gpu_train.sh: --minutes is '$minutes': write a number of minutes" >&2
  exit 2
fi
if [ "${#paths[@]}" -ne 2 ]; then
  echo "usage: gpu_train.sh PROMPTS WORK [--wheels FOLDER] [--minutes 9]" >&2
  exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/gpu_suite/environment.sh"
need torch numpy safetensors tokenizers jinja2 yaml rich pydantic pydantic_core pydantic_settings gguf accelerate peft \
  tensorboard matplotlib
# Every step gets what is left of the time, and one that is asked to end (SIGTERM) keeps what it has: a whole minute is
# left for that. The signal is for the step alone, so that nothing ends before it.
seconds="$(python3 -c 'import sys; print(max(1, round(60 * float(sys.argv[1]) - 60)))' "$minutes")"
export DEADLINE="$(($(date +%s) + seconds))"
cat > "$links/hamburger-command" <<'EOF'
#!/usr/bin/env bash
left="$((DEADLINE - $(date +%s)))"
exec timeout --kill-after=50 "$((left > 1 ? left : 1))" \
  python3 -c 'import sys; from hamburger.server.cli import main; sys.exit(main())' "$@"
EOF
chmod +x "$links/hamburger-command"
code=0
HAMBURGER="$links/hamburger-command" bash "$root/training/embedded.sh" "${paths[@]}" || code=$?
if { [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; } && [ "$(date +%s)" -ge "$DEADLINE" ]; then
  echo "the time is over: the same call goes on from here" >&2
  exit 75
fi
if [ "$code" -eq 137 ]; then
  echo "a step was killed before its time was over: did the machine's memory suffice?" >&2
fi
exit "$code"
