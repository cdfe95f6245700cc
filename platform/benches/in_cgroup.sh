#!/usr/bin/env bash
# Runs a command in a memory cgroup of its own. usage: in_cgroup.sh LIMIT_MB COMMAND...
# Needs root; cgroup v1 or v2. Prints the group's peak at the end and removes it.
set -euo pipefail
limit=$(( ${1:?usage: in_cgroup.sh LIMIT_MB COMMAND...} << 20 ))
shift
if [ -d /sys/fs/cgroup/memory ]; then
  group=/sys/fs/cgroup/memory/leanstream-$$ max=memory.limit_in_bytes peak=memory.max_usage_in_bytes
else
  group=/sys/fs/cgroup/leanstream-$$ max=memory.max peak=memory.peak
fi
mkdir "$group"
trap 'sleep 0.2; rmdir "$group"' EXIT
echo "$limit" > "$group/$max"
status=0
bash -c 'echo $$ > "$0/cgroup.procs" && exec "$@"' "$group" "$@" || status=$?
echo "cgroup: peak $(( $(cat "$group/$peak") >> 20 )) of $(( limit >> 20 )) MiB" >&2
exit "$status"
