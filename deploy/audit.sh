#!/usr/bin/env bash
# Asks the advisory database (PyPI's; OSV's with AUDIT_SERVICE=osv) about every pinned package. Needs the network.
#
#     deploy/audit.sh [constraints.txt ...]
#
# Fails when a known vulnerability is found, and also when a package could not be looked up: silence is no proof.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

[ $# -gt 0 ] || set -- constraints.txt deploy/clients-constraints.txt
python="${PYTHON:-python3}"
venv=build/audit-venv
[ -x "$venv/bin/pip-audit" ] || {
  "$python" -m venv --clear "$venv"
  "$venv/bin/python" -m pip install --quiet "pip-audit>=2.9,<3"
}
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
status=0
for file in "$@"; do
  echo "== $file"
  # A local build's name (+cpu) is no version that a database knows.
  sed -E 's/\+[a-z0-9.]+$//' "$file" >"$work/requirements.txt"
  "$venv/bin/pip-audit" --strict --disable-pip --no-deps --vulnerability-service "${AUDIT_SERVICE:-pypi}" \
    --progress-spinner off --requirement "$work/requirements.txt" || status=1
done
exit "$status"
