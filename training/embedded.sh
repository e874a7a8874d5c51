#!/usr/bin/env bash
# Trains the embedded default from prompts alone: answers, their scores, a drafter, export. It needs no network. Whatever
# ends it, call it again with the same arguments: every step goes on where it was.
#
#   training/embedded.sh PROMPTS WORK      PROMPTS: folder of prompt files (*.jsonl.gz); WORK: folder for all it makes
#
# COMPOSED=1        composed groups, the published form, too: two more stages of training, and their quality
# INIT=...          the graft to begin from, a folder of ours (model/builtin/graft); else a new one
# ANSWERS=20000     answers to write              DISTILL=... STAGE1=... STAGE2=... STAGE3=... QUALITY=...   further options
# HAMBURGER=...     the command, else ours, else that on the PATH
# FILES="code gsm8k_train"   only these prompt files
set -euo pipefail

prompts="${1:?name the folder of prompt files}"
work="${2:?name a folder for what is made}"
own="$(dirname -- "${BASH_SOURCE[0]}")/../.venv/bin/hamburger"  # what `make` installs
if [ ! -x "$own" ]; then own=hamburger; fi
hamburger="${HAMBURGER:-$own}"
layers=7,14,22,29  # of the trunk, whose states the drafter reads
features=(--set "graft.feature_layers=[$layers]")
open="gsm8k_train code instruct_chat summarize_rewrite_translate context_qa_stories open_qa t0_open classification"
files=()
for name in ${FILES:-$open}; do files+=("$prompts/$name.jsonl.gz"); done
mkdir -p "$work"

# train NAME RECIPE DATA [options]: goes on from the run's latest checkpoint if there is one
train() {
  local run="$work/$1" recipe="$2" data="$work/$3"
  shift 3
  if [ -f "$run/latest" ]; then set -- "$@" --resume; fi
  "$hamburger" train "$recipe" --data "$data" --out "$run" "$@"
}

# shellcheck disable=SC2086 # the options of a step are words
{
  "$hamburger" distill "${files[@]}" --out "$work/answers.jsonl" --limit "${ANSWERS:-20000}" --max-tokens 320 \
    --keep-loops ${DISTILL:-}
  "$hamburger" segment "$work/answers.jsonl" --out "$work/data" --loops cut --states "$layers"
  train stage1 frozen data --set cached_states=true "${features[@]}" ${INIT:+--init "$INIT"} ${STAGE1:-}
  stage1="$work/stage1/$(cat "$work/stage1/latest")"
  if [ -z "${COMPOSED:-}" ]; then
    "$hamburger" export "$work/stage1" --out "$work/export" --groups verified --calibrate "$work/data" --held-back \
      --data "$work/data" --overwrite
    exit
  fi
  "$hamburger" regroup "$work/data" --model "$stage1" --confidence 0.15,0.7 --out "$work/own"
  train stage2 merges own --init "$stage1" "${features[@]}" ${STAGE2:-}
  train stage3 dial own --init "$work/stage2/$(cat "$work/stage2/latest")" "${features[@]}" ${STAGE3:-}
  "$hamburger" export "$work/stage3" --out "$work/export" --groups composed --calibrate "$work/own" --held-back \
    --data "$work/data" --overwrite
  "$hamburger" eval-quality --model "$work/export" --prompts "${files[@]}" --out "$work/quality" ${QUALITY:-}
}
