#!/bin/bash
# One run on the ranks of some machines, a process each:  launch_mpirun.sh NUM_RANKS RECIPE [--set KEY=VALUE]...
# For mpirun of Open MPI: MPICH's knows no --mca.
# HOSTFILE names the machines, a line each: "node1 slots=8"; without it all ranks are on this one. DRY=1 only shows it.
set -euo pipefail
(($# >= 2)) || { echo "usage: $0 NUM_RANKS RECIPE [--set KEY=VALUE]..." >&2; exit 2; }
ranks=$1 recipe=$2
shift 2
moebius=${MOEBIUS:-build/moebius}

# Wrong layouts are found here, on one process, with the table of who is where.
"$moebius" config "$recipe" "$@" --ranks "$ranks" >/dev/null

# After a SIGTERM the ranks need more than mpirun's one second to save.
launch=(mpirun -n "$ranks" ${HOSTFILE:+--hostfile "$HOSTFILE"} --mca odls_base_sigkill_timeout 120
  "$moebius" train "$recipe" "$@")
if [[ -n ${DRY:-} ]]; then
  echo "${launch[@]}"
else
  exec "${launch[@]}"
fi
