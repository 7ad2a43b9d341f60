#!/usr/bin/env bash
# Tests docker-compose.yml on the Docker engine that answers. Where none does, but the folder DOCKER_TOOLS has scripts
# that bring one, and a base image, with no registry: on that engine, which ends with this script.
# Arguments are pytest's.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
tools=${DOCKER_TOOLS:-../shared/docker}

if ! docker info >/dev/null 2>&1; then
  if [ ! -x "$tools/docker-engine.sh" ] || [ ! -x "$tools/make-base-image.sh" ] || [ "$(id -u)" != 0 ]; then
    echo "container test skipped: no Docker engine answers, and none can be started here"
    exit 0
  fi
  scratch=$(mktemp -d)
  export ENGINE_DIR=$scratch/engine
  trap '"$tools/docker-engine.sh" stop; rm -rf "$scratch"' EXIT
  export TORCH=torch==2.13.0
  if ! "$tools/docker-engine.sh" install || ! exports=$("$tools/docker-engine.sh" start) || ! eval "$exports" ||
    ! "$python" -m pip download -q --no-deps --dest "$scratch/wheels" "$TORCH" ||
    ! WHEELS=$scratch/wheels WORK=$scratch/base "$tools/make-base-image.sh"; then
    echo "container test skipped: no Docker engine with a base image could be started here"
    exit 0
  fi
fi
"$python" -m pytest tests/test_compose.py "$@"
