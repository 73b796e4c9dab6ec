#!/bin/bash
# A gateway and the raylet it needs, as one: either's end is the end of both, and SIGTERM drains.
# A Ray driver finds its raylet among the processes that it sees, so both live in one container.
# RAY_ADDRESS is the head's HOST:PORT; the arguments are those of `tandem serve`.
trap 'exit 143' TERM INT
until ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1 & wait $!; do
  echo "waiting for the Ray at $RAY_ADDRESS" >&2
  sleep 2
done
trap : TERM INT # only ends the wait below
# No CPUs and no GPUs: no rank is ever placed here, and the controller lives on the head. So there is
# nothing to wait for when it leaves.
export RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=5
ray start --address "$RAY_ADDRESS" --num-cpus 0 --num-gpus 0 \
  --object-store-memory 134217728 --disable-usage-stats --block &
raylet=$!
tandem serve --ray-address "$RAY_ADDRESS" "$@" &
gateway=$!
wait -n "$raylet" "$gateway"
kill -TERM "$gateway" 2>/dev/null
wait "$gateway"
status=$?
kill -TERM "$raylet" 2>/dev/null
wait "$raylet"
exit "$status"
