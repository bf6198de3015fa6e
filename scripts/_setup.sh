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

# pip's index, folders and certificate as variables of uv, which reads no settings of pip.
settings_of_uv() {
  .venv/bin/python -m pip config list | .venv/bin/python -c '
import ast, shlex, sys

NAMES = {"index-url": "UV_INDEX_URL", "extra-index-url": "UV_EXTRA_INDEX_URL", "find-links": "UV_FIND_LINKS", "cert": "SSL_CERT_FILE"}
RANKS = {"global": 0, "install": 1, ":env:": 2}
found = {}
for line in sys.stdin:
    place, _, rest = line.strip().partition(".")
    name, _, value = rest.partition("=")
    if name in NAMES and place in RANKS:
        found[name] = max(found.get(name, (-1, "")), (RANKS[place], ast.literal_eval(value)))
for name, (_, value) in found.items():
    separator = "," if name == "find-links" else " "
    print(f"export {NAMES[name]}={shlex.quote(separator.join(value.split()))}")
'
}

# packages_by_uv EXTRA: 10 s of processor time instead of 55 with pip. uv itself comes by its hash, and is kept nowhere.
packages_by_uv() {
  local folder files=(-r requirements/run.txt) ended=0
  [ "$1" = all ] || files+=(-r requirements/dev.txt)
  folder=$(mktemp -d) || return
  (
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --retries 1 --no-compile --no-deps \
      --require-hashes -r requirements/uv.txt --target "$folder" || exit
    eval "$(settings_of_uv)"
    # Whichever index serves a file, its hash is compared.
    uv=("$folder/bin/uv" --no-config --quiet pip install --python .venv/bin/python --no-deps --require-hashes
      --index-strategy unsafe-best-match)
    "${uv[@]}" -r requirements/cpu.txt || true
    "${uv[@]}" "${files[@]}" || exit
    ! needs_cuda || "${uv[@]}" -r requirements/cuda.txt
  ) > /dev/null 2>&1 || ended=$?
  rm -rf "$folder"
  return "$ended"
}

packages_by_pip() { # EXTRA
  # Byte-compiling thousands of files that are never imported would take longer than everything else.
  local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --require-hashes)
  local testing=""
  # Tests' packages are none of the others', and pip takes one processor: two install at once.
  if [ "$1" != all ]; then
    "${pip[@]}" -r requirements/dev.txt >&2 &
    testing=$!
  fi
  # PyTorch's CPU build, where pip has an index or a folder with it, spares the gigabytes of CUDA. The torch of run.txt is met then.
  "${pip[@]}" -r requirements/cpu.txt 2>/dev/null || true
  "${pip[@]}" -r requirements/run.txt >&2 || return
  [ -z "$testing" ] || wait "$testing" || "${pip[@]}" -r requirements/dev.txt >&2 || return
  if needs_cuda; then
    "${pip[@]}" -r requirements/cuda.txt >&2 || return
  fi
}

needs_cuda() {
  .venv/bin/python -c 'from importlib.metadata import requires; exit(not any("cuda" in r for r in requires("torch")))'
}

# packages EXTRA: into .venv what requirements/ names, each file by its hash, and Logweir itself.
packages() {
  # Where uv cannot be had or reaches nothing, pip takes what is missing, and says why it fails.
  packages_by_uv "$1" || packages_by_pip "$1" || return
  # The setuptools of run.txt builds it: a build environment of its own would fetch one without a hash.
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --no-build-isolation --editable . >&2
}

# install EXTRA: "all" for running, "dev" for testing.
install() {
  local extra=$1 python version stamp
  version=$(cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
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
