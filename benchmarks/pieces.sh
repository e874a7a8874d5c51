#!/usr/bin/env bash
# Takes a large file past a limit on the size of files, and proves that it arrived whole.
#
#   pieces.sh split FILE FOLDER SIZE     writes FOLDER/NAME.000, .001, ... of at most SIZE (such as 15M), and NAME.sha256
#   pieces.sh join FOLDER/NAME FILE      FILE from the pieces; fails, and leaves no FILE, where it is not the same
set -euo pipefail

case "${1:-}" in
  split)
    file="${2:?}" folder="${3:?}" size="${4:?}"
    name="$(basename "$file")"
    mkdir -p "$folder"
    rm -f "$folder/$name".[0-9][0-9][0-9]
    split --bytes="$size" --numeric-suffixes --suffix-length=3 "$file" "$folder/$name."
    sha256sum < "$file" > "$folder/$name.sha256"
    ;;
  join)
    pieces="${2:?}" file="${3:?}"
    cat "$pieces".[0-9][0-9][0-9] > "$file.joining"
    if ! sha256sum --status --check "$pieces.sha256" < "$file.joining"; then
      rm "$file.joining"
      echo "$pieces: the pieces do not make the file that was split" >&2
      exit 1
    fi
    mv "$file.joining" "$file"
    ;;
  *)
    echo "usage: pieces.sh split FILE FOLDER SIZE | pieces.sh join FOLDER/NAME FILE" >&2
    exit 2
    ;;
esac
