# Sourced by the scripts beside it: goes to the project's root and makes .venv hold what EXTRA names.
# Nothing but Python 3.11 or newer is needed; a second call costs milliseconds.

cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

find_python() {
  local candidate
  for candidate in "${PYTHON:-}" python3.13 python3.12 python3.11 python3 python; do
    [ -n "$candidate" ] || continue
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "logweir: Python 3.11 or newer was not found; install it, or name it: PYTHON=/path/to/python $0" >&2
  return 2
}

# packages EXTRA: into .venv what requirements/ names, each file by its hash, and Logweir itself.
packages() {
  # Byte-compiling thousands of files that are never imported would take longer than everything else.
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps)
  local testing=""
  # Tests' packages are none of the others', and pip takes one processor: two install at once.
  if [ "$1" != all ]; then
    "${pip[@]}" --require-hashes -r requirements/dev.txt >&2 &
    testing=$!
  fi
  # PyTorch's CPU build, where pip has an index or a folder with it, spares the gigabytes of CUDA. The torch of run.txt is met then.
  "${pip[@]}" --require-hashes -r requirements/cpu.txt 2>/dev/null || true
  "${pip[@]}" --require-hashes -r requirements/run.txt >&2 || return
  [ -z "$testing" ] || wait "$testing" || "${pip[@]}" --require-hashes -r requirements/dev.txt >&2 || return
  if .venv/bin/python -c 'from importlib.metadata import requires; exit(not any("cuda" in r for r in requires("torch")))'; then
    "${pip[@]}" --require-hashes -r requirements/cuda.txt >&2 || return
  fi
  # The setuptools of run.txt builds it: a build environment of its own would fetch one without a hash.
  "${pip[@]}" --no-build-isolation --editable . >&2
}

# What .venv is made from, as one number: another one means that it has to be set up again.
version_of_packages() {
  cat pyproject.toml constraints.txt requirements/*.txt | cksum | cut -d' ' -f1
}

# install EXTRA: "all" for running, "dev" for testing.
install() {
  local extra=$1 python version stamp
  version=$(version_of_packages)
  stamp=".venv/.installed-$extra-$version"
  # What tests need includes what running needs.
  if [ ! -e "$stamp" ] && [ ! -e ".venv/.installed-dev-$version" ]; then
    if [ ! -x .venv/bin/python ]; then
      python=$(find_python) || exit 2
      "$python" -m venv .venv || {
        echo "logweir: $python cannot make virtual environments; install its venv package" >&2
        exit 2
      }
    fi
    echo "setting up .venv (once) ..." >&2
    packages "$extra" || exit 1
    rm -f .venv/.installed-"$extra"-*
    touch "$stamp"
  fi
  export PATH="$PWD/.venv/bin:$PATH"
  # A stack is a dozen processes. Without compiled modules on disk each compiles all that it imports, 2 s of processor time.
  unset PYTHONDONTWRITEBYTECODE
}
