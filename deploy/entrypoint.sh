#!/bin/sh
# The image's entry point: MODEL and BASE stand for HAMBURGER_MODEL and HAMBURGER_BASE. An empty variable is an unset one.
# exec, so that the server itself is process 1 and gets the signal to drain.
export HAMBURGER_MODEL="${HAMBURGER_MODEL:-${MODEL:-}}" HAMBURGER_BASE="${HAMBURGER_BASE:-${BASE:-}}"
exec hamburger "$@"
