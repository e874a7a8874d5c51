# Sourced by gpu.sh and gpu_train.sh: makes the packages of this repository importable where nothing was installed, from
# links in a temporary folder, and asks whether what they need is there. Sets `root` and `links`; reads `wheels` (a folder,
# or empty).
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
links="$(mktemp -d)"
trap 'rm -rf "$links"' EXIT
mkdir "$links/hamburger"
for name in server engine model clients training; do ln -s "$root/$name" "$links/hamburger/$name"; done
# What tells the command its version.
version="$(sed -n 's/^version = "\(.*\)"$/\1/p' "$root/pyproject.toml")"
mkdir "$links/hamburger_serve-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: hamburger-serve\nVersion: %s\n' "$version" \
  > "$links/hamburger_serve-$version.dist-info/METADATA"
if [ -n "${wheels:-}" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$links" \
    "$wheels"/*.whl
fi
export PYTHONPATH="$links${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

# need NAME...: ends the script with one line where an importable module of these names is missing
need() {
  local missing
  missing="$(python3 -c 'import sys
from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "$@")"
  if [ -n "$missing" ]; then
    echo "not installed here: $missing. Put their wheels into a folder and name it: --wheels FOLDER" >&2
    exit 2
  fi
}
